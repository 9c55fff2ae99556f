"""Casts to fp32 the low-precision tensors that a root's modules keep, which the script may read."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from types import FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.weak import WeakTensorKeyDictionary

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.call_state import CONTAINERS, Backup
from fasttrain.shim.hooks.containers import (
    CLOSED,
    LONG,
    Put,
    children_of,
    map_tensors,
    more_children_of,
)
from fasttrain.shim.hooks.dynamo import pass_over
from fasttrain.shim.hooks.gradients import lift
from fasttrain.shim.hooks.seams import Reading

# Finds low-precision tensors that a root's call has left where the script can read them.
#
# A forward may keep what it computes in a closure, on a class, or in an object inside an object:
# no list of places is complete. So after each of the first calls all that the forward can reach
# is searched: its modules and arguments, their classes, closures and globals, and what these
# hold. Tensors that the call has left there are cast to fp32, and the root runs in the script's
# own precision from then on, because a search after each call would cost too much.
#
# Objects that a call returns are few. They are searched after each call, without classes, modules
# and globals, and the root goes on in low precision. Only if a tensor can't be replaced there, such
# as in a set, the call is repeated in fp32.
#
# Tensors that only the autograd graph holds, such as a checkpoint's, can't be found, and stay in
# low precision.


MOST_IN_A_SEARCH = 20_000  # objects; 0.5 us each
MOST_IN_ALL = 400_000
MOST_IN_AN_OUTPUT = 2_000
MOST_DEEP = 8
RETURNS_MUCH = "it returns more objects than are searched for tensors"
RETURNS_FIXED = "it returns tensors where they can't be replaced"


class Reach:
    """Searches before and after a call.

    Args:
        dtype: The low precision.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._left = MOST_IN_ALL
        self._scripts: Any = WeakTensorKeyDictionary()  # tensors that were there before the call

    def note(self, *starts: Any) -> None:
        """Note the low-precision tensors that are there before a call: they stay as they are."""
        self._note(self._search_all(starts))

    def lift(self, *starts: Any) -> str:
        """Cast the tensors that the call has left; return what holds the last one, or empty."""
        search = self._search_all(starts)
        places = [put for tensor, put in search.found if self._is_left(tensor)]
        self._cast(search, lift)
        return _holder_in(places[-1]) if places else ""

    def note_given(self, *given: Any) -> None:
        """Note the low-precision tensors in what a call is handed, which it may return."""
        if not _is_plain(given, self._dtype):
            self._note(_Search(given, self._dtype, MOST_IN_AN_OUTPUT, within=True))

    def lift_output(self, output: Any, lift: Callable[[Tensor], Tensor]) -> str:
        """Cast the tensors in objects of any class that a call returns.

        Returns:
            Why there may be low-precision tensors in it that are not cast; empty if there are none.
        """
        if _is_plain(output, self._dtype):
            return ""
        search = self._search_output(output)
        if not search.found:
            return "" if search.whole else RETURNS_MUCH
        self._cast(search, lift)
        search = self._search_output(output)
        places = [put for tensor, put in search.found if self._is_left(tensor)]
        if places:
            return f"{RETURNS_FIXED}, in {_holder_in(places[-1])}"
        return "" if search.whole else RETURNS_MUCH

    def _search_output(self, output: Any) -> _Search:
        return _Search(((output,),), self._dtype, MOST_IN_AN_OUTPUT, within=True)

    def _search_all(self, starts: Iterable[Any]) -> _Search:
        search = _Search(starts, self._dtype, min(MOST_IN_A_SEARCH, self._left))
        self._left -= search.looked
        return search

    def _note(self, search: _Search) -> None:
        for tensor, _ in search.found:
            self._scripts[tensor] = True

    def _is_left(self, tensor: Tensor) -> bool:
        return tensor.dtype is self._dtype and tensor not in self._scripts

    def _cast(self, search: _Search, lift: Callable[[Tensor], Tensor]) -> None:
        def change(tensor: Tensor) -> Tensor:
            return lift(tensor) if self._is_left(tensor) else tensor

        for tensor, put in search.found:
            if put is not None and self._is_left(tensor):
                _put(put, change(tensor))
        if any(put is None for _, put in search.found):
            for items, put in search.tuples:
                if any(map(self._is_left, _tensors_of(items))):
                    _put(put, map_tensors(items, change))


class _Search:
    """Looks through objects, those first that are the fewest steps away.

    Args:
        starts: Where it begins.
        dtype: The precision that is looked for.
        most: How many objects it comes upon before it ends.
        within: Whether to leave out what objects share with others: classes, modules and globals.

    Attributes:
        found: The tensors of that precision, each with what replaces it in its holder, or None.
        tuples: The tuples in which nothing can be replaced, but which can be themselves.
        looked: How many objects it has looked into.
        whole: Whether it came to an end.
    """

    def __init__(
        self, starts: Iterable[Any], dtype: torch.dtype, most: int, *, within: bool = False
    ) -> None:
        self.found: list[tuple[Tensor, Put | None]] = []
        self.tuples: list[tuple[tuple[Any, ...], Put]] = []
        self.looked = 0
        cut = False
        pending: deque[Any] = deque(starts)
        seen: set[int] = set()
        kept: list[Any] = []  # references, so that no id is used twice
        while pending and len(seen) < most:
            self.looked += 1
            holder = pending.popleft()
            try:
                children = children_of(holder, type(holder))
                if within:
                    children = [*children, *more_children_of(holder, type(holder))]
            except Exception:  # noqa: BLE001, S112 - other threads, and classes of any kind
                continue
            for child, put in children:
                kind = type(child)  # not its __class__, which a proxy may fake
                if issubclass(kind, Tensor):
                    if child.dtype is dtype:
                        self.found.append((child, put))
                elif id(child) not in seen and not issubclass(kind, CLOSED):
                    seen.add(id(child))
                    kept.append(child)
                    if within and _is_shared(child, kind, holder):
                        continue
                    pending.append(child)
                    if put is not None and issubclass(kind, tuple):
                        self.tuples.append((child, put))
            cut = cut or (within and _is_cut(holder, dtype))
        self.whole = not pending and not cut


def _is_plain(value: Any, dtype: torch.dtype, deep: int = MOST_DEEP) -> bool:
    """True if a value surely holds no tensor of ``dtype``; takes 0.5 us a tensor."""
    kind = type(value)
    if kind is Tensor:
        return value.dtype is not dtype
    if kind in (tuple, list, dict) and deep:
        items = value.values() if kind is dict else value
        return all(_is_plain(item, dtype, deep - 1) for item in items)
    return kind in (NoneType, bool, int, float, str)


def _holder_in(put: Put | None) -> str:
    """Return the kind of object in which a search has found a tensor."""
    holder = getattr(put, "args", ("a tuple or a set",))[0]
    return holder if isinstance(holder, str) else f"a {type(holder).__name__}"


def _is_cut(holder: Any, dtype: torch.dtype) -> bool:
    """True if only the end of a container is searched, and more than that may hold tensors."""
    kind = type(holder)
    if not issubclass(kind, (tuple, list, dict, deque, set, frozenset)) or len(holder) <= LONG:
        return False
    items = list(dict.values(holder) if issubclass(kind, dict) else holder)
    return not all(_is_plain(item, dtype) for item in items)


def _is_shared(child: Any, kind: type, holder: Any) -> bool:
    of_function = type(holder) is FunctionType and child is holder.__globals__
    return of_function or issubclass(kind, type | Module)


def _tensors_of(items: tuple[Any, ...]) -> Iterator[Tensor]:
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, tuple):
            yield from _tensors_of(item)


def _put(put: Put, value: Any) -> None:
    """Replace what an object holds; if it refuses, the tensor stays in low precision there."""
    with suppress(Exception):
        put(value)


# Casts to fp32 the low-precision tensors that a root's modules keep, which the script may read.


TORCHS = frozenset(vars(Module()))


class _Attributes:
    """The attributes of a module that are tensors, or None and may become one; 0.1 us for each."""

    def __init__(self, part: Module) -> None:
        self._part = weakref.ref(part)
        self._known = -1  # how many attributes there are of all kinds
        self._names: list[str] = []

    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        part = self._part()
        values = {} if part is None else vars(part)
        if len(values) != self._known:
            self._known = len(values)
            kinds = {name: type(value) for name, value in list(values.items())}
            self._names = [n for n, k in kinds.items() if k in (Tensor, NoneType)]
            self._names = [name for name in self._names if name not in TORCHS]
        for name in self._names:
            value = values.get(name)
            if type(value) is Tensor and (changed := change(value)) is not value:
                values[name] = changed


class KeptTensors:
    """The attributes and buffers in which the modules of one root keep tensors from a call.

    Args:
        backup: The root's state before a call.
        dtype: The low precision.
    """

    def __init__(self, backup: Backup, dtype: torch.dtype) -> None:
        self._backup = backup
        self._dtype = dtype
        self._places: dict[tuple[int, str], weakref.ref[Module]] = {}  # by id and name
        self._attributes: list[_Attributes] = []
        self._scripts: Any = WeakTensorKeyDictionary()  # low-precision tensors of the script's own

    def note(self) -> None:
        """Note the tensors that are in low precision before the call: they stay as they are."""
        for _, before in self._backup.attributes:
            for name, value in before.items():
                if name not in TORCHS:
                    self._map(value, self._note)

    def lift(self) -> None:
        """Cast to fp32 what the call has put there.

        Containers are searched for new tensors after the first calls, attributes after all.
        """
        for slot, name in self._backup.changed_buffers():
            buffer = slot.get(name)
            if buffer is not None:  # it was not deleted
                slot[name] = self._change(buffer)
        for part, before in self._backup.attributes:
            for name, value in list(vars(part).items()):  # other threads
                new = value is not before.get(name) or type(value) in CONTAINERS
                if new and name not in TORCHS and self._map(value, self._change) is not value:
                    self._places[id(part), name] = weakref.ref(part)
        if self._backup.watched:
            parts = (part for part, _ in self._backup.attributes)
            self._attributes = [
                _Attributes(part)
                for part in parts
                if not type(part).__module__.startswith("torch.nn.")
            ]
        for attributes in self._attributes:
            attributes.change(self._change)
        for (_, name), ref in list(self._places.items()):
            holder = ref()
            values = {} if holder is None else vars(holder)
            if name in values:
                values[name] = self._lifted(values[name])

    def _lifted(self, value: Any) -> Any:
        lifted = self._map(value, self._change)
        if lifted is value or type(value) not in CONTAINERS:
            return lifted
        # In place: others may hold the container too.
        if type(value) is dict:
            value.update(lifted)
        else:
            for at, item in enumerate(lifted):
                value[at] = item
        return value

    def _map(self, value: Any, change: Callable[[Tensor], Tensor]) -> Any:
        try:
            return map_tensors(value, change)
        except RecursionError:  # it holds itself
            return value

    def _note(self, tensor: Tensor) -> Tensor:
        if tensor.dtype is self._dtype:
            self._scripts[tensor] = True
        return tensor

    def _change(self, tensor: Tensor) -> Tensor:
        low = tensor.dtype is self._dtype and tensor not in self._scripts
        return lift(tensor) if low else tensor


def allow_numpy(live: Callable[[], bool], undo: ExitStack) -> None:
    """Have ``Tensor.numpy`` return bf16 tensors in fp32: NumPy has no bf16, and torch raises."""

    def make(original: Any) -> Any:
        def numpy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if tensor.dtype is torch.bfloat16 and live():
                return original(tensor.float(), *args, **kwargs)
            return original(tensor, *args, **kwargs)

        pass_over(numpy)
        return numpy

    patching.wrap(Tensor, "numpy", make, undo, Reading.AMP)
