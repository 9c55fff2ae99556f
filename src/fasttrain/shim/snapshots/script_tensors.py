"""Tensors that the script carries from step to step: averaged weights, hidden states, sums.

They are searched for where scripts keep them: in the local variables of its running functions, in
lists and dictionaries, and in attributes of its own objects. A replay creates the variables but
computes nothing, so that the contents of these tensors have to be restored. The same holds for
generators of random numbers from which models and data sets draw, and for numbers that they change
in objects of the script's that they hold.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import sys
import weakref
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import zip_longest
from operator import setitem
from types import FrameType, GeneratorType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from fasttrain.shim.data_parallel.split.lazy_rows import whole
from fasttrain.shim.hooks.containers import is_scripts, module_name
from fasttrain.shim.process.callsite import own_prefixes
from fasttrain.shim.snapshots.files import log, refuse_diverged
from fasttrain.shim.snapshots.generators import State, generator_state, set_generator

Numbers = dict[str, dict[str, Any]]  # numbers in attributes of objects, by where the objects are

_HASHED_BYTES = 1 << 30  # one second's work; of a larger tensor only this many elements are hashed:
_SAMPLED_ELEMENTS = 1 << 20


def are_alike(tensor: Tensor, other: Tensor) -> bool:
    """True if both have the same shape and dtype, so that one can be copied into the other."""
    return (tensor.shape, tensor.dtype) == (other.shape, other.dtype)


def fill(tensor: Tensor, value: Tensor) -> None:
    """Copy a value into a tensor of its shape, even a view, a leaf or an inference tensor."""
    with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        own = tensor.detach()
        _unexpanded(own).copy_(value[tuple(slice(n) for n in _unexpanded(own).shape)])


def _unexpanded(tensor: Tensor) -> Tensor:
    """Return it without `expand`'s repetitions: `copy_` refuses a target with shared elements."""
    if tensor.layout is torch.strided:
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.size(dim) > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


def stamp(tensor: Tensor) -> tuple[int, bytes]:
    """Return what changes with the content: torch's version counter and a hash.

    The counter alone isn't enough: changes through ``tensor.data`` and NumPy aren't counted, and
    inference tensors have none (-1 here).
    """
    return -1 if tensor.is_inference() else tensor._version, _hash(tensor.detach())


def is_stamped(tensor: Tensor, before: tuple[int, bytes]) -> bool:
    """True if the content is unchanged since the stamp was taken."""
    if not tensor.is_inference() and tensor._version != before[0]:
        return False
    return _hash(tensor.detach()) == before[1]


def _hash(tensor: Tensor) -> bytes:
    readable = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta
    if not readable or not tensor.numel():
        return b""
    flat = _unexpanded(tensor).reshape(-1)
    if flat.nbytes > _HASHED_BYTES:
        flat = flat[:: max(1, flat.numel() // _SAMPLED_ELEMENTS)]
    flat = flat.cpu().contiguous()
    # By address: a tensor has no buffer protocol, and NumPy may be missing.
    content = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
    return hashlib.sha256(content).digest()


def merged(there: Any, then: Any) -> Any:
    """Return the saved value, in the present objects where they can be updated in place.

    Others that refer to such an object, such as an optimizer to a tensor, go on to refer to it.
    """
    if isinstance(there, Tensor) and isinstance(then, Tensor) and are_alike(there, then):
        fill(there, then)
        return there
    if isinstance(there, dict) and isinstance(then, dict):
        items = {key: merged(there.get(key), value) for key, value in then.items()}
        there.clear()
        there.update(items)
        return there
    if type(there) is type(then) and isinstance(there, list | deque):
        both = zip_longest(list(there)[: len(then)], then)
        items_in_order = [merged(one, other) for one, other in both]
        there.clear()
        there.extend(items_in_order)
        return there
    if type(there) is type(then) is tuple and len(there) == len(then):
        return tuple(map(merged, there, then))
    return then


_DEEPEST = 6  # levels: a trainer that holds an average that holds a dictionary of tensors has 3
_LONGEST = 10_000  # items: a longer list is taken for a data set, whose items don't change
_ELSEWHERE = (Module, Optimizer, DataLoader, ModuleType, type, str, bytes)
# Objects of the standard library and torch hold no tensors of a script, except for the holders.
_KNOWN = sys.stdlib_module_names | {"torch"}
_HOLDERS = (SimpleNamespace, Namespace, Dataset)
DATA = "data set"  # prefix of the names of what a data set holds


_Meet = Callable[[str, Any], None]


class ScriptTensors:
    """Finds such tensors, except those that existed before training and never change.

    Args:
        holders: Yields the objects to search, other than variables, with names for them.
    """

    def __init__(self, holders: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        self._holders = holders
        # Weak: most are a step's batch and results. One that torch keeps alive without a Python
        # object loses its reference, and is then saved without need.
        self._constant: dict[int, tuple[weakref.ref[Tensor], tuple[int, bytes]]] = {}
        self._first: Numbers = {}  # those after the first step

    def begin(self) -> None:
        """Note after the first step what there is: some of it will never change."""
        self._first = self._numbers()
        self._constant = {id(t): (weakref.ref(t), stamp(t)) for _, t in self._found()}

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that have changed since the first step, by where they are."""
        return {where: t.detach() for where, t in self._found() if not self._is_constant(t)}

    def _is_constant(self, tensor: Tensor) -> bool:
        known = self._constant.get(id(tensor))
        return known is not None and known[0]() is tensor and is_stamped(tensor, known[1])

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Restore the saved values, in the present tensors where they have the same shape.

        Raises:
            SystemExit: ``snapshot-diverged`` if one is missing.
        """
        missing = dict.fromkeys(saved)

        def restored(where: str, tensor: Tensor) -> Tensor:
            missing.pop(where, None)
            return _restored(tensor, saved[where]) if where in saved else tensor

        self._visit(restored)
        # What a data set lacks is a cache of samples that were read: reading fills it again.
        for where in missing:
            if not where.startswith(DATA):
                refuse_diverged(f"the tensor {where} is missing")

    def generators(self) -> dict[str, State]:
        """Return the states of the script's generators, by where they are."""
        found: dict[str, State] = {}

        def note(where: str, value: Any) -> None:
            if (state := generator_state(value)) is not None:
                found[where] = state

        self._visit(_as_it_is, note)
        return found

    def restore_generators(self, saved: dict[str, State]) -> None:
        """Restore the result of `generators`; report those that the script hasn't made again."""
        missing = dict.fromkeys(saved)

        def restore(where: str, value: Any) -> None:
            now = generator_state(value) if where in saved else None
            if now is not None and saved[where][0] == now[0]:
                missing.pop(where, None)
                set_generator(value, saved[where])

        self._visit(_as_it_is, restore)
        if missing:
            log(f"generators of random numbers that are missing start again: {', '.join(missing)}")

    def numbers(self) -> Numbers:
        """Return numbers that have changed since the first step, in objects that the holders hold.

        Those of the script's variables are right, as a replay runs the script's own code.
        """
        changed = {}
        for where, of_object in self._numbers().items():
            first = self._first.get(where, {})
            new = {name: n for name, n in of_object.items() if first.get(name) != n}
            if new:
                changed[where] = new
        return changed

    def restore_numbers(self, saved: Numbers) -> None:
        """Restore the result of `numbers` in those of the objects that there are."""

        def restore(where: str, value: Any) -> None:
            if where in saved and _is_scripts(value):
                for name, number in saved[where].items():
                    object.__setattr__(value, name, number)

        self._visit(_as_it_is, restore, self._holders())

    def _numbers(self) -> Numbers:
        found: Numbers = {}

        def note(where: str, value: Any) -> None:
            if _is_scripts(value):
                found[where] = {
                    str(name): n for name, n, _ in _items(value) if type(n) in (int, float, bool)
                }

        self._visit(_as_it_is, note, self._holders())
        return found

    def _found(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that the script can reach, each once."""
        found: list[tuple[str, Tensor]] = []

        def note(where: str, tensor: Tensor) -> Tensor:
            found.append((where, tensor))
            return tensor

        self._visit(note)
        return found

    def _visit(
        self,
        visit: Callable[[str, Tensor], Tensor],
        meet: _Meet = lambda *_: None,
        places: Iterable[tuple[str, Any]] | None = None,
    ) -> None:
        """Call a function on each such tensor, which may return another one to put in its place.

        Args:
            visit: The function.
            meet: Called with anything else, and where it is.
            places: Where to search, with names: if left out, the variables and the holders.
        """
        walk = _Walk(visit, meet)
        for name, value in [*_variables(), *self._holders()] if places is None else places:
            walk.below(value, name, _DEEPEST)


def _is_scripts(value: Any) -> bool:
    """True for an object of a class of the script's own, and not of an installed package."""
    if isinstance(value, FrameType | GeneratorType | dict | list | deque | tuple):
        return False
    module = sys.modules.get(module_name(type(value)))
    return is_scripts(getattr(module, "__file__", None) or "<")


def _as_it_is(_: str, tensor: Tensor) -> Tensor:
    return tensor


def _restored(tensor: Tensor, value: Tensor) -> Tensor:
    """Return the tensor filled with a value, or one like it if the value has another shape.

    Shapes such as that of ``x[keep]`` depend on contents, which a replay doesn't compute.
    """
    if are_alike(tensor, value):
        fill(tensor, value)
        return tensor
    return value.to(tensor.device).requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _variables() -> Iterator[tuple[str, FrameType]]:
    """Yield the frames of the script's running functions, the outermost first."""
    own = own_prefixes()
    frame: FrameType | None = sys._getframe(1)
    frames: list[FrameType] = []
    while frame is not None:
        if not frame.f_code.co_filename.startswith(own):
            frames.append(frame)
        frame = frame.f_back
    for depth, one in enumerate(reversed(frames)):
        yield f"{one.f_code.co_name}:{depth}", one


class _Walk:
    """Looks for tensors in values, and puts others in their place.

    Args:
        visit: Called with each tensor and where it is; returns what is to be there.
        meet: Called with anything else, and where it is.
    """

    def __init__(self, visit: Callable[[str, Tensor], Tensor], meet: _Meet) -> None:
        self._visit, self._meet = visit, meet
        self._seen: dict[int, tuple[Any, Any]] = {}  # each value, and what is to be in its place

    def below(self, value: Any, where: str, depth: int) -> Any:
        """Return what is to be in a value's place: itself, unless a tensor was replaced."""
        if isinstance(value, _ELSEWHERE):
            return value
        if id(value) not in self._seen:
            self._seen[id(value)] = value, value
            self._seen[id(value)] = value, self._looked_into(value, where, depth)
        return self._seen[id(value)][1]

    def _looked_into(self, value: Any, where: str, depth: int) -> Any:
        if isinstance(value, Tensor):
            if isinstance(value, Parameter):  # a module's, and saved with it
                return value
            tensor = whole(value)
            visited = self._visit(where, tensor)
            return value if visited is tensor else visited
        self._meet(where, value)
        if not depth:
            return value
        where = f"{DATA} ({where})" if isinstance(value, Dataset) else where
        if isinstance(value, tuple):
            return self._in_tuple(value, where, depth)
        for name, item, put in _items(value):
            instead = self.below(item, f"{where}.{name}", depth - 1)
            if instead is not item:
                put(instead)
        return value

    def _in_tuple(self, value: tuple[Any, ...], where: str, depth: int) -> Any:
        if _is_too_long(value):
            return value
        items = [self.below(item, f"{where}.{n}", depth - 1) for n, item in enumerate(value)]
        if all(one is other for one, other in zip(items, value, strict=True)):
            return value
        kind: Any = type(value)
        return kind(*items) if hasattr(kind, "_fields") else kind(items)


_Put = Callable[[Any], None]


def _items(value: Any) -> Iterator[tuple[Any, Any, _Put]]:
    """Yield names and items of a value, each with a function that puts another one in its place."""
    if isinstance(value, FrameType):
        for name, item in list(value.f_locals.items()):
            yield name, item, partial(_set_variable, value, name)
        _drop_copy(value)
    elif isinstance(value, GeneratorType):  # suspended at a yield
        yield from _items(value.gi_frame) if value.gi_frame else ()
    elif isinstance(value, dict | list | deque):
        if not _is_too_long(value):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in list(pairs):
                yield key, item, partial(setitem, value, key)
    elif isinstance(value, _HOLDERS) or module_name(type(value)).partition(".")[0] not in _KNOWN:
        yield from _items(getattr(value, "__dict__", {}))
        for name in list(_slots(value)):
            yield name, getattr(value, name), partial(object.__setattr__, value, name)


def _is_too_long(value: Any) -> bool:
    """True if it isn't looked into, except for a history of losses, which grows in the loop."""
    if len(value) <= _LONGEST:
        return False
    return isinstance(value, dict) or not isinstance(value[-1], Tensor)


def _set_variable(frame: FrameType, name: str, value: Any) -> None:
    variables = frame.f_locals
    variables[name] = value
    # Up to Python 3.12 those of a function are a copy.
    ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def _drop_copy(frame: FrameType) -> None:
    """Empty the copy of a function's variables that up to Python 3.12 lives as long as its frame.

    It stays if somebody else holds it, such as a script that has called ``locals()``.
    """
    variables = frame.f_locals
    of_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED and isinstance(variables, dict)
    if of_function and sys.getrefcount(variables) <= 3:  # the frame, this variable, the argument
        variables.clear()


def _slots(value: Any) -> Iterator[str]:
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if isinstance(vars(kind).get(name), MemberDescriptorType) and hasattr(value, name):
                yield name
