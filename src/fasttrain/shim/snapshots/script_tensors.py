"""Tensors that the script carries from step to step: averaged weights, hidden states, sums.

They are searched for where scripts keep them: in the local variables of its running functions, in
lists and dictionaries, and in attributes of its own objects. A replay creates the variables but
computes nothing, so that the contents of these tensors have to be restored.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from types import FrameType, GeneratorType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from fasttrain.shim.data_parallel.split.lazy_rows import whole
from fasttrain.shim.hooks.containers import module_name
from fasttrain.shim.process.callsite import own_prefixes
from fasttrain.shim.snapshots.files import refuse_diverged

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


class ScriptTensors:
    """Finds such tensors, except those that existed before training and never change.

    Args:
        holders: Yields the objects to search, other than variables, with names for them.
    """

    def __init__(self, holders: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        self._holders = holders
        self._constant: dict[int, tuple[Tensor, tuple[int, bytes]]] = {}

    def begin(self) -> None:
        """Note after the first step which tensors there are: some of them will never change."""
        self._constant = {id(t): (t, stamp(t)) for _, t in self._found()}

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that have changed since the first step, by where they are."""
        return {where: t.detach() for where, t in self._found() if not self._is_constant(t)}

    def _is_constant(self, tensor: Tensor) -> bool:
        known = self._constant.get(id(tensor))
        return known is not None and known[0] is tensor and is_stamped(tensor, known[1])

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Copy the saved values into the present tensors.

        Raises:
            SystemExit: ``snapshot-diverged`` if one is missing or has another shape.
        """
        there = dict(self._found())
        for where, value in saved.items():
            tensor = there.get(where)
            if tensor is None and where.startswith(DATA):
                continue  # a cache of samples that were read: reading fills it again
            if tensor is None or not are_alike(tensor, value):
                refuse_diverged(f"the tensor {where} is missing or has another shape or dtype")
            fill(tensor, value)

    def _found(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the script can reach, each once."""
        seen: set[int] = set()
        for name, value in [*_variables(), *self._holders()]:
            yield from _below(value, name, _DEEPEST, seen)


def _variables() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the local variables of the script's running functions, the outermost first."""
    own = own_prefixes()
    frame: FrameType | None = sys._getframe(1)
    frames: list[FrameType] = []
    while frame is not None:
        if not frame.f_code.co_filename.startswith(own):
            frames.append(frame)
        frame = frame.f_back
    for depth, one in enumerate(reversed(frames)):
        yield f"{one.f_code.co_name}:{depth}", one.f_locals


def _below(value: Any, where: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if id(value) in seen or isinstance(value, _ELSEWHERE):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if not isinstance(value, Parameter):  # a module's, and saved with it
            yield where, whole(value)
    elif depth:
        where = f"{DATA} ({where})" if isinstance(value, Dataset) else where
        for name, item in _items(value):
            yield from _below(item, f"{where}.{name}", depth - 1, seen)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        if len(value) <= _LONGEST:
            yield from value.items()
    elif isinstance(value, list | tuple | deque):
        # A long list that ends in a tensor is a history of losses, which grows in the loop.
        if len(value) <= _LONGEST or isinstance(value[-1], Tensor):
            yield from enumerate(value)
    elif isinstance(value, GeneratorType):  # suspended at a yield
        yield from value.gi_frame.f_locals.items() if value.gi_frame else ()
    elif isinstance(value, _HOLDERS) or module_name(type(value)).partition(".")[0] not in _KNOWN:
        yield from list(getattr(value, "__dict__", {}).items())
        yield from _slots(value)


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if isinstance(vars(kind).get(name), MemberDescriptorType) and hasattr(value, name):
                yield name, getattr(value, name)
