"""Detects what a call does beside its result: printing, drawing, changes outside its modules."""

from __future__ import annotations

import array
import builtins
import functools
import io
import logging
import random
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from threading import get_ident
from types import CellType, FrameType, FunctionType, GeneratorType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from fasttrain.shim.data_parallel.answers.places import asking
from fasttrain.shim.data_parallel.random_streams import alike
from fasttrain.shim.data_parallel.tensor_sums import sums_of
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.containers import CLOSED, children_of, is_a, is_scripts, module_name
from fasttrain.shim.hooks.seams import Filing, Hooking, Reading
from fasttrain.shim.process.callsite import called_by_user

# Detects side effects that don't show in tensors: printing, drawing, reading numbers in Python.


READS = "it reads numbers of its tensors in Python, and may branch on them for all rows"


_CHANGING = frozenset("wax+")  # in the mode of a file that is opened to be written
_FILES: Any = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.FileIO)


class SideEffectWatch:
    """Context that notices side effects of a call which don't show in tensors.

    Each would be there once more for every call of a trial, and for one rank's rows.

    Attributes:
        seen: The last one in words; empty if there was none.
    """

    def __init__(self) -> None:
        self.seen = ""
        self._thread = get_ident()
        self._undo = ExitStack()

    def __enter__(self) -> None:
        patching.wrap(Tensor, "register_hook", self._hooking, self._undo, Hooking.TRIAL)
        for name in ("tolist", "numpy"):
            patching.wrap(Tensor, name, self._reading, self._undo, Reading.TRIAL)
        for owner in (builtins, io):
            patching.wrap(owner, "open", self._opening, self._undo, Filing.TRIAL)
        patching.wrap(torch, "save", self._writing, self._undo, Filing.TRIAL)
        for kind in _FILES:
            patching.wrap(kind, "write", self._writing, self._undo)
        patching.wrap(logging.Logger, "callHandlers", self._logging, self._undo)
        patching.wrap(warnings, "showwarning", self._warning, self._undo)
        _redirect(_Listening(sys.stdout, self), _Listening(sys.stderr, self), self._undo)

    def _hooking(self, original: Any) -> Any:
        def register_hook(tensor: Tensor, hook: Any) -> Any:
            if called_by_user(through=()):
                self.seen = "it registers hooks on gradients"
            return original(tensor, hook)

        return register_hook

    def _reading(self, original: Any) -> Any:
        def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.seen = READS
            return original(tensor, *args, **kwargs)

        return method

    def _opening(self, original: Any) -> Any:
        @functools.wraps(original)
        def opened(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            if _CHANGING.intersection(str(mode)):
                self._note_file(sys._getframe(1))
            return original(file, mode, *args, **kwargs)

        return opened

    def _writing(self, original: Any) -> Any:
        @functools.wraps(original)
        def write(*args: Any, **kwargs: Any) -> Any:
            self._note_file(sys._getframe(1))
            return original(*args, **kwargs)

        return write

    def _note_file(self, frame: FrameType) -> None:
        # Neither what other threads write, nor what a library does for itself, such as a cache.
        if get_ident() == self._thread and asking(frame) is not None:
            self.seen = self.seen or "it writes to a file"

    def _logging(self, original: Any) -> Any:
        @functools.wraps(original)
        def log(*args: Any, **kwargs: Any) -> Any:
            if get_ident() == self._thread:
                self.seen = self.seen or "it logs"
            return original(*args, **kwargs)

        return log

    def _warning(self, original: Any) -> Any:
        @functools.wraps(original)
        def showwarning(*args: Any, **kwargs: Any) -> Any:
            before = self.seen
            original(*args, **kwargs)
            # Not that it prints: a warning of torch's, in the first call only, is no print().
            self.seen = before or "it shows a warning"

        return showwarning

    def __exit__(self, *_: object) -> None:
        self._undo.close()


class _Listening:
    """Wraps a stream, and notes that it is written to."""

    def __init__(self, stream: Any, watch: SideEffectWatch) -> None:
        self._stream, self._watch = stream, watch

    def write(self, text: str) -> Any:
        self._watch.seen = "it prints"
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Silence:
    """Context that drops what is printed."""

    def __enter__(self) -> None:
        self._stream, self._undo = sys.stdout, ExitStack()
        _redirect(self, self, self._undo)

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def write(self, text: str) -> int:
        """Drop the text."""
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _redirect(out: Any, err: Any, undo: ExitStack) -> None:
    undo.enter_context(redirect_stdout(out))
    undo.enter_context(redirect_stderr(err))


def other_random_states() -> list[tuple[Any, Any]]:
    """Return the states of Python's and NumPy's generators, each with its setter."""
    states: list[tuple[Any, Any]] = [(random.setstate, random.getstate())]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        states.append((numpy.set_state, numpy.get_state()))
    return states


def all_random_states() -> list[tuple[Any, Any]]:
    """Return the states of all generators, including torch's, each with its setter."""
    generators: list[Any] = [torch.default_generator]
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        generators += cuda.default_generators
    states = [(generator.set_state, generator.get_state()) for generator in generators]
    return [*states, *other_random_states()]


def same_states(one: list[tuple[Any, Any]], other: list[tuple[Any, Any]]) -> bool:
    """True if nothing was drawn between two captures."""
    if len(one) != len(other):
        return True  # NumPy was imported in between
    return all(alike(a, b) for (_, a), (_, b) in zip(one, other, strict=True))


# Detects whether a call changes anything outside its modules.
#
# A forward may count its calls in a global, append to a list, or write into a tensor that a
# closure holds. Such a call can't be repeated for a comparison, and would store one rank's rows
# only: it isn't split.


_DEPTH = 4  # levels of iterators over iterators
_SMALL = 1 << 16  # items; larger arrays aren't compared
_BYTES = (bytearray, array.array)
_IN_MEMORY = (io.StringIO, io.BytesIO)
_ITERATORS = ("itertools", "builtins")
_FSDP = "torch.distributed.fsdp"


def generator_state(holder: Any) -> bytes:
    """Return the state of a random number generator; empty for anything else."""
    if is_a(holder, torch.Generator):
        return bytes(holder.get_state().tolist())
    if is_a(holder, random.Random) and not is_a(holder, random.SystemRandom):
        return repr(holder.getstate()).encode()
    if module_name(type(holder)).startswith("numpy.random."):
        return _numpy_state(holder)
    return b""


def put_generator_state(holder: Any, state: bytes) -> None:
    """Restore a generator of torch's; others aren't, which a second comparison shows."""
    if is_a(holder, torch.Generator):
        holder.set_state(torch.tensor(list(state), dtype=torch.uint8, device="cpu"))


def _numpy_state(holder: Any) -> bytes:
    bits = getattr(holder, "bit_generator", None) or getattr(holder, "_bit_generator", holder)
    return repr([_flat(value) for value in _values(bits.state)]).encode()


def _values(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in _values(value)]
    return [state]


def _flat(value: Any) -> Any:
    return value.tobytes() if hasattr(value, "tobytes") else value


def hidden_state(holder: Any) -> list[Any]:
    """Return the state of an array, buffer or iterator that attributes don't show; else nothing."""
    kind = type(holder)
    if kind in _BYTES:
        return [bytes(holder) if len(holder) <= _SMALL else 0]
    if kind in _IN_MEMORY:
        return [holder.tell()]
    return _parts(holder, _DEPTH) if _is_iterator(kind) else []


def _is_iterator(kind: type) -> bool:
    # A generator's state is its local variables, which the search finds by itself.
    pythons = kind.__module__ in _ITERATORS and hasattr(kind, "__next__")
    return pythons and kind is not GeneratorType


def _parts(value: Any, depth: int) -> list[Any]:
    kind = type(value)
    if kind is int:
        return [value]
    if isinstance(value, tuple):
        return [part for item in value for part in _parts(item, depth)]
    if depth and _is_iterator(kind):
        return [kind.__name__, *_parts(value.__reduce__(), depth - 1)]
    return [len(value)] if isinstance(value, list) else []


MOST = 20_000  # objects per search; 0.5 us each
MOST_TENSORS = 500  # the first tensors to be reached are summed
_BY_VALUE = (bool, int, float, str, bytes, complex, set)
_REGISTRY = "__warningregistry__"
_Holder = tuple[Any, list[Any], int]  # an object, its contents, and its distance
# How an object is reached: from modules and arguments alone; through globals, which threads may
# change; or through objects of libraries, whose caches don't matter.
NEAR, GLOBAL, LIBRARYS = range(3)
_HOLDING = (
    Module, Tensor, dict, list, tuple, set, frozenset, deque, CellType, MethodType,
    functools.partial,
)  # fmt: skip


class CallSurroundings:
    """The state of all objects that a call can reach, at one moment.

    Args:
        module: The root.
        starts: Its arguments.
    """

    def __init__(self, module: Module, *starts: Any) -> None:
        # Attributes of the modules are compared by `ModuleState`.
        own = list(Module.modules(module))
        self._own = {id(vars(part)) for part in own}
        for part in own:
            self._own |= {id(part._buffers), id(part._parameters), id(part._modules)}
            self._own |= {id(buffer) for buffer in part._buffers.values()}
        self._holders: list[_Holder] = []
        self._tensors: list[Tensor] = []
        self._search([module, *starts])
        self._sums = sums_of(self._tensors)

    def modules(self) -> list[Module]:
        """Return the modules that the root and its arguments hold without having them as parts."""
        found = (h for h, _, distance in self._holders if distance == NEAR)
        return [h for h in found if issubclass(type(h), Module) and id(vars(h)) not in self._own]

    def changed(self, *, within: int = LIBRARYS) -> str:
        """Return the type of the first object that has changed; empty if none has.

        Args:
            within: The largest distance: `NEAR`, `GLOBAL` or `LIBRARYS`.
        """
        for holder, _ in self._others(within):
            return type(holder).__name__
        return "Tensor" if sums_of(self._tensors) != self._sums else ""

    def restore(self, *, within: int) -> bool:
        """Restore containers and generators; return True if that undoes all changes."""
        for holder, before in list(self._others(within)):
            with suppress(Exception):  # of classes of any kind
                _put_back(holder, before)
        return not self.changed(within=within)

    def _others(self, within: int) -> Iterator[tuple[Any, list[Any]]]:
        for holder, before, distance in self._holders:
            if distance > within:
                continue
            now = _contents(holder)
            if len(now) != len(before) or not all(map(_same, now, before)):
                yield holder, before

    def _search(self, starts: Iterable[Any]) -> None:
        pending = deque((start, NEAR) for start in starts)
        seen = {id(start) for start, _ in pending}
        while pending and len(seen) < MOST:
            holder, distance = pending.popleft()
            try:
                children = _held_by(holder)
            except Exception:  # noqa: BLE001, S112 - other threads, and classes of any kind
                continue
            if id(holder) not in self._own:
                self._holders.append((holder, _contents(holder), distance))
                if _is_summed(holder) and len(self._tensors) < MOST_TENSORS:
                    self._tensors.append(holder)
            distance = max(distance, _distance(holder))
            for child in children:
                if id(child) not in seen and _is_open(child):
                    seen.add(id(child))
                    pending.append((child, distance))


def _distance(holder: Any) -> int:
    """Return the distance of an object's contents."""
    if is_a(holder, FunctionType | type):
        return GLOBAL
    if is_a(holder, _HOLDING):
        return NEAR
    module = sys.modules.get(type(holder).__module__)
    return NEAR if is_scripts(getattr(module, "__file__", None) or "<") else LIBRARYS


def _held_by(holder: Any) -> list[Any]:
    return [child for child, _ in children_of(holder, type(holder))]


def _is_open(child: Any) -> bool:
    kind = type(child)  # not __class__, which a proxy may fake
    if issubclass(kind, Tensor | Module):
        return True
    # What FSDP keeps of its modules changes with each call.
    return not issubclass(kind, CLOSED) and not module_name(kind).startswith(_FSDP)


def _is_summed(holder: Any) -> bool:
    # Of known kinds, small enough, and with data: a meta tensor has none.
    kinds = is_a(holder, Tensor) and type(holder) in (Tensor, Parameter)
    return kinds and holder.numel() <= _SMALL and holder.device.type != "meta"


def _contents(holder: Any) -> list[Any]:
    if is_a(holder, Tensor):
        return [0 if holder.is_inference() else holder._version]
    kind = type(holder)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return [holder.tobytes() if holder.nbytes <= _SMALL else 0]
    if is_a(holder, dict):
        return [{k: v for k, v in dict.items(holder) if k != _REGISTRY and not _is_weak(k, v)}]
    if is_a(holder, set | frozenset):
        return [{item for item in holder if not _is_weak(item)}]
    if is_a(holder, list | tuple | deque):
        return list(holder)
    try:
        if state_of := generator_state(holder):
            return [state_of]
        return hidden_state(holder) or _held_by(holder)
    except Exception:  # noqa: BLE001 - as above
        return []


def _is_weak(*items: Any) -> bool:
    return any(is_a(item, weakref.ref) for item in items)  # its target may die at any time


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) is dict:
        return one.keys() == other.keys() and all(_same(v, other[k]) for k, v in one.items())
    return type(one) in _BY_VALUE and bool(one == other)


def _put_back(holder: Any, before: list[Any]) -> None:
    """Restore a container's contents or a random number generator's state."""
    if is_a(holder, dict):
        now, held = _contents(holder)[0], before[0]
        for key in now.keys() - held.keys():
            del holder[key]
        for key, value in held.items():
            if now.get(key, now) is not value:
                holder[key] = value
    elif is_a(holder, set):
        holder -= _contents(holder)[0]
        holder |= before[0]
    elif is_a(holder, list | deque):
        holder.clear()
        holder.extend(before)
    elif before:
        put_generator_state(holder, before[0])
