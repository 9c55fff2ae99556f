"""Records what the calls of roots return, so that a replay makes the like of it without a call.

Of each output its *form* is recorded (types, names, shapes, and whether gradients flow), and the
numbers and words in it. The contents of tensors in a replay are those of an output of such a kind
that was really computed, in training or in evaluation: in the first step, or by the first such call
of the replay. An output that holds objects of unknown classes has no form from which another can be
made.

What calls leave on the modules themselves, such as an auxiliary loss, is recorded as a part of
their outputs. It is found by comparing the attributes before and after the first call in training,
or in evaluation. The second one shows which of these the first one alone had to leave.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
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
from fasttrain.shim.snapshots.object_states import own_attributes

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
    seen: Tensor, shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool
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


# What calls leave on modules.


_LOOKS = 2  # calls that are compared
_MOST_VALUES = 1_000  # of a call: with more, its module keeps a history, which grows with each one
_Place = tuple[weakref.ref[Module], str]  # a module and the name of an attribute


class _Left(dict[str, Any]):
    """What a call returned, by an empty name, and what it left on modules, by names."""


def _with_left(output: Any, names: Iterable[str], places: dict[str, _Place]) -> Any:
    """Return an output together with the attributes of some names; alone if there are none."""
    left = _Left({name: _attribute(places[name]) for name in names if name in places})
    return _Left({"": output, **left}) if left else output


def _attribute(place: _Place) -> Any:
    part = place[0]()
    return None if part is None else vars(part).get(place[1])


def _put(left: _Left, places: dict[str, _Place]) -> Any:
    """Put attributes where they were left, and return the output."""
    for name, value in left.items():
        part = places[name][0]() if name else None
        if part is not None:
            vars(part)[places[name][1]] = value
    return left[""]


def _names_in(form: Form) -> tuple[str, ...]:
    """Return the names in a form of what a call left; none if that is nothing but the output."""
    return form[2][1:] if isinstance(form, tuple) and form[1] == _Left.__qualname__ else ()


def _places_in(module: Module) -> Iterator[tuple[str, _Place, Any]]:
    """Yield the script's attributes of a module and its parts, with their places and values."""
    for path, part in Module.named_modules(module):
        for name, value in own_attributes(part):
            yield f"{path}.{name}", (weakref.ref(part), name), value


# The calls so far, and in a replay those to come.


UNKNOWN = object()  # returned for an output that has to be computed


_Recorded = tuple[list[int], list[Any], dict[bool, list[str]]]  # see `_Calls.state`


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
        left: The attributes that calls leave on modules, by whether the module is training.
        looks: How many calls were compared for that.
        before: The identities of all attributes before such a call; None at other times.
        places: In a replay, where any call has left an attribute.
        then: In a replay, the values of the run that took the snapshot.
        to_come: In a replay, the numbers of the forms that follow the next one.
        next: In a replay, the number of the form of the next one; None if there is none.
        seen: In a replay, outputs that were computed, by whether the module was training and kind.
    """

    forms: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    form: Form = UNKNOWN
    left: dict[bool, dict[str, _Place]] = field(default_factory=dict)
    looks: dict[bool, int] = field(default_factory=dict)
    before: dict[str, int] | None = None
    places: dict[str, _Place] = field(default_factory=dict)
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

    def state(self) -> _Recorded:
        """Return what a snapshot holds of them."""
        left = {training: list(places) for training, places in self.left.items()}
        return self.forms, self.values, left

    def look(self, module: Module) -> None:
        """Look for attributes that a call has left."""
        before, self.before = self.before or {}, None
        self.looks[module.training] = self.looks.get(module.training, 0) + 1
        self.left.pop(module.training, None)
        for name, place, value in _places_in(module):
            if before.get(name) != id(value) and kind_of(form_of(value, [])) is not None:
                self.left.setdefault(module.training, {})[name] = place


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
        self._then: list[_Recorded] | None = None
        self._known: list[_Known] = []

    def install(self, roots: RootCalls, undo: ExitStack) -> None:
        """Record the outputs of calls."""
        roots.on_call.append(self._called)
        undo.callback(roots.on_call.remove, self._called)
        roots.on_return.append(self._returned)
        undo.callback(roots.on_return.remove, self._returned)

    def apart(self) -> bool:
        """True if calls don't count: a replay doesn't make them, or makes them in any order."""
        return self._apart_now() or threading.get_ident() != self._thread

    def _called(self, root: Root, *_: Any) -> None:
        calls: _Calls | None = root.calls
        module = root.ref()
        if module is None:
            return
        if calls is not None and calls.looks.get(module.training) == _LOOKS:
            return
        if self.apart():
            return
        calls = self._calls_of(root)
        if calls.next is None:
            calls.before = {name: id(value) for name, _, value in _places_in(module)}

    def _returned(self, root: Root, output: Any) -> None:
        if self.apart():
            return
        calls = self._calls_of(root)
        if calls.next is not None:
            self._note_again(root, calls.next, output)
            return
        module = root.ref()
        if calls.before is not None and module is not None:
            calls.look(module)
        at = len(calls.values)
        if calls.left and module is not None:
            left = calls.left.get(module.training, {})
            output = _with_left(output, left, left)
        form = form_of(output, calls.values)
        if len(calls.values) - at > _MOST_VALUES:
            calls.left = {}
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
                forms, calls.then, left = self._then[len(self._calls)]
                calls.left = {training: _found(root, names) for training, names in left.items()}
                known = [self._known[number].form for number in set(forms[::2])]
                calls.places = _found(root, {name for form in known for name in _names_in(form)})
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
        made = made_like(calls.seen[key], form, iter(calls.then[at : at + count]))
        return _put(made, calls.places) if type(made) is _Left else made

    def see(self, root: Root, output: Any) -> None:
        """Keep a copy of an output that was computed, to make others like it."""
        values: list[Any] = []
        calls = self._calls_of(root)
        if calls.next is not None:
            output = _with_left(output, _names_in(self._known[calls.next].form), calls.places)
        form = form_of(output, values)
        kind = kind_of(form)
        if kind is None:
            return
        with torch.inference_mode(mode=False), torch.no_grad():
            kept = made_like(output, form, iter(values))
            for tensor in tensors_in(kept):
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.requires_grad_()
        calls.seen[_is_training(root), kind] = kept

    # --- snapshots

    def state(self) -> dict[str, Any]:
        """Return the outputs so far."""
        return {
            "forms": [_each_tensor(form, _plain) for form in self._numbers],
            "calls": [calls.state() for calls in self._calls],
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
            calls.places.clear()


def _is_training(root: Root) -> bool:
    module = root.ref()
    return module is not None and module.training


def _found(root: Root, names: Iterable[str]) -> dict[str, _Place]:
    """Return the places of attributes that the calls of the run before left."""
    module = root.ref()
    parts = dict(Module.named_modules(module)) if module is not None else {}
    places = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        if path in parts:
            places[name] = (weakref.ref(parts[path]), attribute)
    return places


def _walk(forms: list[int]) -> Iterator[int]:
    """Yield the number of each output's form."""
    for at in range(0, len(forms), 2):
        yield from repeat(forms[at], forms[at + 1])
