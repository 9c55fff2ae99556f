"""Records what the calls of roots return, so that a replay makes the like of it without a call.

Of each output its *form* is recorded (types, names, shapes, and whether gradients flow), and the
numbers and words in it. The contents of tensors in a replay are those of an output of such a kind
that was really computed, in training or in evaluation: in the first step, or by the first such call
of the replay. An output that holds objects of unknown classes has no form from which another can be
made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fasttrain.shim.data_parallel.split.lazy_rows import whole
from fasttrain.shim.hooks.containers import (
    attributes_of,
    holds_by_attributes,
    items_of,
    tensors_in,
    with_parts,
)
from fasttrain.shim.hooks.roots import Root, RootCalls
from fasttrain.shim.snapshots.batches import array_again, resized, small_array

# The form of an output, and an output of a given form.


# Of a tensor: (_TENSOR, shape, dtype, whether it requires a gradient). Of a container: (_ITEMS or
# _NAMED, its class, names, *the forms of its parts). Of a number or word: _VALUE. None of None.
Form = Any
_TENSOR, _VALUE, _ITEMS, _NAMED, _OTHER = "tensor", "value", "items", "named", "other"
_VALUES = frozenset({int, float, bool, str})
_NAMES = frozenset({int, str})
_DEEPEST = 6  # levels: an object may hold itself


def form_of(output: Any, values: list[Any], deepest: int = _DEEPEST) -> Form:
    """Return an output's form, and append the numbers and words in it to ``values``."""
    if isinstance(output, Tensor):
        if output.is_nested:  # has no shape
            return (_OTHER, "nested")
        return (_TENSOR, output.shape, output.dtype, output.requires_grad)
    if output is None:
        return None
    if type(output) in _VALUES:
        values.append(output)
        return _VALUE
    if (array := small_array(output)) is not None:
        values.append(array)
        return _VALUE
    return _form_of_container(output, values, deepest - 1)


def _form_of_container(output: Any, values: list[Any], deepest: int) -> Form:
    kind = type(output).__qualname__
    # The lengths in a packed sequence are a tensor, whose content has to fit the others.
    if not deepest or isinstance(output, PackedSequence):
        return (_OTHER, kind)
    if isinstance(output, list | tuple):
        return (_ITEMS, kind, None, *[form_of(item, values, deepest) for item in output])
    if isinstance(output, MutableMapping):
        parts = items_of(output)
    elif holds_by_attributes(output):
        parts = attributes_of(output)
    else:
        return (_OTHER, kind)
    if not _NAMES.issuperset(map(type, parts)):
        return (_OTHER, kind)
    forms = [form_of(part, values, deepest) for part in parts.values()]
    return (_NAMED, kind, tuple(parts), *forms)


def made_like(seen: Any, form: Form, values: Iterator[Any]) -> Any:
    """Return an output of a form, whose tensors have the contents of another of its kind.

    Args:
        seen: The other one, whose form has the same `kind_of`.
        form: The form.
        values: The numbers and words in it.
    """
    if form is None:
        return None
    if form == _VALUE:
        value = next(values)
        return array_again(*value[1:]) if type(value) is tuple else value
    if form[0] == _TENSOR:
        return _tensor_like(seen, *form[1:])
    kind, _, names, *parts = form
    if kind == _ITEMS:
        like = [seen[n % len(seen)] for n in range(len(parts))]
        return with_parts(
            seen, [made_like(*pair, values) for pair in zip(like, parts, strict=True)]
        )
    by_name = seen if isinstance(seen, MutableMapping) else attributes_of(seen)
    pairs = zip(names, parts, strict=True)
    return with_parts(seen, {name: made_like(by_name[name], part, values) for name, part in pairs})


def _tensor_like(
    seen: Tensor, shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool  # noqa: FBT001
) -> Tensor:
    # With gradients it is no leaf, which the script couldn't change in place.
    made = resized(whole(seen) if requires_grad else whole(seen).detach(), shape).to(dtype)
    return made.requires_grad_() if requires_grad and not made.requires_grad else made


def kind_of(form: Form) -> Any:
    """Return what two forms share if one output can be made like the other; None if none can."""
    if not isinstance(form, tuple):
        return (form,)
    if form[0] == _OTHER:
        return None
    if form[0] == _TENSOR:
        _, shape, dtype, _ = form
        return (_TENSOR, len(shape), dtype.is_floating_point, dtype.is_complex)
    parts = tuple(map(kind_of, form[3:]))
    if None in parts:
        return None
    if form[0] == _ITEMS and len(set(parts)) == 1:  # a list has as many as there are samples
        parts = parts[:1]
    return (*form[:3], *parts)


def _values_in(form: Form) -> int:
    if isinstance(form, tuple) and form[0] in (_ITEMS, _NAMED):
        return sum(map(_values_in, form[3:]))
    return int(form == _VALUE)


def _each_tensor(form: Form, change: Callable[[Form], Form]) -> Form:
    """Return a form with ``change`` applied to the forms of its tensors."""
    if not isinstance(form, tuple) or form[0] == _OTHER:
        return form
    if form[0] == _TENSOR:
        return change(form)
    return (*form[:3], *(_each_tensor(part, change) for part in form[3:]))


def _plain(form: Form) -> Form:
    kind, shape, dtype, requires_grad = form
    return (kind, tuple(shape), str(dtype), requires_grad)


def _of_plain(form: Form) -> Form:
    kind, shape, dtype, requires_grad = form
    return (kind, shape, getattr(torch, dtype.removeprefix("torch.")), requires_grad)


# The calls so far, and in a replay those to come.


UNKNOWN = object()  # returned for an output that has to be computed


class _Known(NamedTuple):
    form: Form
    kind: Any
    values: int  # how many are in it


@dataclass(slots=True, eq=False)
class _Calls:
    """What the calls of one root have returned.

    Attributes:
        forms: Their forms, run-length encoded: a form's number and then how many outputs in a row
            have it, and so on.
        values: The numbers and words in all of them.
        form: The form of the last one.
        then: In a replay, the values of the run that took the snapshot.
        to_come: In a replay, the numbers of the forms that follow the next one.
        next: In a replay, the number of the form of the next one; None if there is none.
        seen: In a replay, outputs that were computed, by whether the module was training and kind.
    """

    forms: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    form: Form = UNKNOWN
    then: list[Any] = field(default_factory=list)
    to_come: Iterator[int] = field(default_factory=lambda: iter(()))
    next: int | None = None
    seen: dict[Any, Any] = field(default_factory=dict)

    def note(self, number: int) -> None:
        """Note the form of an output."""
        if self.forms and self.forms[-2] == number:
            self.forms[-1] += 1
        else:
            self.forms += (number, 1)


class RootOutputs:
    """The outputs of all roots of this process, which it numbers in the order of their first calls.

    Args:
        apart: True if a replay skips the code that runs now.
    """

    def __init__(self, apart: Callable[[], bool]) -> None:
        self._apart_now = apart
        self._thread = threading.get_ident()
        self._numbers: dict[Form, int] = {}
        self._calls: list[_Calls] = []
        self._then: list[tuple[list[int], list[Any]]] | None = None
        self._known: list[_Known] = []

    def install(self, roots: RootCalls, undo: ExitStack) -> None:
        """Record the outputs of calls."""
        roots.on_return.append(self._returned)
        undo.callback(roots.on_return.remove, self._returned)

    def apart(self) -> bool:
        """True if calls don't count: a replay doesn't make them, or makes them in any order."""
        return self._apart_now() or threading.get_ident() != self._thread

    def _returned(self, root: Root, output: Any) -> None:
        if self.apart():
            return
        calls = self._calls_of(root)
        if calls.next is not None:
            self._note_again(root, calls.next, output)
            return
        form = form_of(output, calls.values)
        if form == calls.form:
            calls.forms[-1] += 1
        else:
            calls.form = form
            calls.note(self._numbers.setdefault(form, len(self._numbers)))

    def _calls_of(self, root: Root) -> _Calls:
        calls: _Calls | None = root.calls
        if calls is None:
            calls = root.calls = _Calls()
            if self._then is not None and len(self._calls) < len(self._then):
                forms, calls.then = self._then[len(self._calls)]
                calls.to_come = _walk(forms)
                calls.next = next(calls.to_come, None)
            self._calls.append(calls)
        return calls

    def _note_again(self, root: Root, number: int, output: Any) -> None:
        """Note what the call returned then; keep the output if it is the first of its kind."""
        calls = self._calls_of(root)
        known = self._known[number]
        if (_is_training(root), known.kind) not in calls.seen:
            self.see(root, output)
        at = len(calls.values)
        calls.values += calls.then[at : at + known.values]
        calls.note(number)
        calls.next = next(calls.to_come, None)

    # --- a replay

    def again(self, root: Root) -> Any:
        """Return the like of what the next call of a root returned; `UNKNOWN` if it can't be."""
        calls = self._calls_of(root)
        if calls.next is None:
            return UNKNOWN
        form, kind, count = self._known[calls.next]
        key = _is_training(root), kind
        if key not in calls.seen:
            return UNKNOWN
        at = len(calls.values)
        return made_like(calls.seen[key], form, iter(calls.then[at : at + count]))

    def see(self, root: Root, output: Any) -> None:
        """Keep a copy of an output that was computed, to make others like it."""
        values: list[Any] = []
        form = form_of(output, values)
        kind = kind_of(form)
        if kind is None:
            return
        with torch.inference_mode(mode=False), torch.no_grad():
            kept = made_like(output, form, iter(values))
            for tensor in tensors_in(kept):
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.requires_grad_()
        self._calls_of(root).seen[_is_training(root), kind] = kept

    # --- snapshots

    def state(self) -> dict[str, Any]:
        """Return the outputs so far."""
        return {
            "forms": [_each_tensor(form, _plain) for form in self._numbers],
            "calls": [(calls.forms, calls.values) for calls in self._calls],
        }

    def replay(self, state: dict[str, Any]) -> None:
        """Take the outputs to come from those that were recorded."""
        forms = [_each_tensor(form, _of_plain) for form in state["forms"]]
        self._numbers = {form: number for number, form in enumerate(forms)}
        self._known = [_Known(form, kind_of(form), _values_in(form)) for form in forms]
        self._then = state["calls"]

    def arrive(self) -> None:
        """End the replay, and forget what only it needs."""
        self._then, self._known = None, []
        for calls in self._calls:
            calls.next, calls.then, calls.to_come = None, [], iter(())
            calls.seen.clear()


def _is_training(root: Root) -> bool:
    module = root.ref()
    return module is not None and module.training


def _walk(forms: list[int]) -> Iterator[int]:
    """Yield the number of each output's form."""
    for at in range(0, len(forms), 2):
        yield from repeat(forms[at], forms[at + 1])
