"""Tensors that the script itself carries from step to step: averaged weights, hidden states, sums.

They are looked for where a script keeps them: in the variables of its functions that are running,
in its lists and dictionaries, and in the attributes of its own objects. A replay makes the
variables, but computes nothing, so that what is in these tensors has to be put there.
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
from fasttrain.shim.process.callsite import own_prefixes
from fasttrain.shim.snapshots.errors import refuse_diverged

# What is in a tensor: put there, and told apart from what was there before.


_LOOKED_AT_BYTES = 1 << 30  # a second's work; of what is larger, that many elements are looked at:
_LOOKED_AT = 1 << 20


def are_alike(tensor: Tensor, other: Tensor) -> bool:
    """Return whether one can be filled with the other's content."""
    return (tensor.shape, tensor.dtype) == (other.shape, other.dtype)


def fill(tensor: Tensor, value: Tensor) -> None:
    """Put a value of the same shape into a tensor, whatever it hangs on or was made by."""
    with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        own = tensor.detach()
        _unexpanded(own).copy_(value[tuple(slice(n) for n in _unexpanded(own).shape)])


def _unexpanded(tensor: Tensor) -> Tensor:
    """Give it without the repetitions that `expand` made, which share their memory."""
    if tensor.layout is torch.strided:
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.size(dim) > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


def stamp(tensor: Tensor) -> tuple[int, bytes]:
    """Return what changes when the content does: torch's count of changes, and a hash.

    ``tensor.data`` and NumPy change a tensor without being counted, and what inference_mode made
    has no count.
    """
    return -1 if tensor.is_inference() else tensor._version, _hash(tensor.detach())


def is_stamped(tensor: Tensor, before: tuple[int, bytes]) -> bool:
    """Return whether the content is what it was when a stamp was given."""
    if not tensor.is_inference() and tensor._version != before[0]:
        return False
    return _hash(tensor.detach()) == before[1]


def _hash(tensor: Tensor) -> bytes:
    readable = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta
    if not readable or not tensor.numel():
        return b""
    flat = _unexpanded(tensor).reshape(-1)
    if flat.nbytes > _LOOKED_AT_BYTES:
        flat = flat[:: max(1, flat.numel() // _LOOKED_AT)]
    flat = flat.cpu().contiguous()
    # torch's tensors are no buffers, and NumPy may be missing.
    content = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
    return hashlib.sha256(content).digest()


def merged(there: Any, then: Any) -> Any:
    """Return what was, in the objects that are there now where they can take it in.

    What else holds one of them, such as an optimizer a tensor, goes on to hold the same.
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


_DEEPEST = 6  # a trainer that holds an average that holds a dictionary of tensors has 3
_LONGEST = 10_000  # of a list that may be a data set: its items don't change in a loop
_ELSEWHERE = (Module, Optimizer, DataLoader, ModuleType, type, str, bytes)
_KNOWN = sys.stdlib_module_names | {"torch"}  # whose objects hold no tensors of a script, but for:
_HOLDERS = (SimpleNamespace, Namespace, Dataset)
DATA = "data set"  # begins the names of what one holds


class Carried:
    """Finds such tensors, and leaves out those that were there before training and never change.

    Args:
        holders: Gives what to look into beside variables, with names for it.
    """

    def __init__(self, holders: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        self._holders = holders
        self._constant: dict[int, tuple[Tensor, tuple[int, bytes]]] = {}

    def begin(self) -> None:
        """Note, behind the first step, what is there and may never change."""
        self._constant = {id(t): (t, stamp(t)) for _, t in self._found()}

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that are not as they were behind the first step, by where they are."""
        return {where: t.detach() for where, t in self._found() if not self._is_constant(t)}

    def _is_constant(self, tensor: Tensor) -> bool:
        known = self._constant.get(id(tensor))
        return known is not None and known[0] is tensor and is_stamped(tensor, known[1])

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Put the values into the tensors that are there now.

        Raises:
            SystemExit: ``snapshot-diverged`` when one is missing or has another shape.
        """
        there = dict(self._found())
        for where, value in saved.items():
            tensor = there.get(where)
            if tensor is None and where.startswith(DATA):
                continue  # what it keeps of having been read comes again when it is
            if tensor is None or not are_alike(tensor, value):
                refuse_diverged(f"the tensor {where} is not what it was")
            fill(tensor, value)

    def _found(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the script can reach, each once."""
        seen: set[int] = set()
        for name, value in [*_variables(), *self._holders()]:
            yield from _below(value, name, _DEEPEST, seen)


def _variables() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield those of the script's functions that are running, the outermost first."""
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
        if not isinstance(value, Parameter):  # which belong to modules
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
        # What grows in a loop grows at its end: a hundred thousand losses are no data set.
        if len(value) <= _LONGEST or isinstance(value[-1], Tensor):
            yield from enumerate(value)
    elif isinstance(value, GeneratorType):  # one that waits in the middle
        yield from value.gi_frame.f_locals.items() if value.gi_frame else ()
    elif isinstance(value, _HOLDERS) or type(value).__module__.partition(".")[0] not in _KNOWN:
        yield from list(getattr(value, "__dict__", {}).items())
        yield from _slots(value)


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if isinstance(vars(kind).get(name), MemberDescriptorType) and hasattr(value, name):
                yield name, getattr(value, name)
