"""What batches consist of: whether two are the same to the bit, and how one is sent."""

from __future__ import annotations

import io
import os
import pickle
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from multiprocessing.reduction import ForkingPickler
from types import FunctionType, ModuleType
from typing import Any, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.nn import Parameter

from fasttrain.shim.hooks.containers import module_name

LONGEST = 200  # characters of an error
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where torch puts tensors that it sends
SMALL = 4096  # bytes: a tensor's storage may be larger than twice what it shows by as many
_PROTOCOL = 5


@dataclass(slots=True)
class Unread:
    """Sent in the place of a batch that a worker couldn't read or send."""

    why: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Return one with an error as the reason."""
        return cls(f"{type(error).__name__}: {error}"[:LONGEST])


class Content:
    """What a batch consists of: its tensors, and the rest in bytes.

    Args:
        batch: Any object.

    Raises:
        Exception: It can't be pickled.
    """

    def __init__(self, batch: Any) -> None:
        written = io.BytesIO()
        writer = _Writer(written)
        writer.dump(batch)
        self._rest = written.getvalue()
        # What it consists of stays, so that nothing else gets its place in memory.
        self._places = {place: value for value in writer.changeable for place in _places(value)}
        self._copies = [tensor.detach().clone() for tensor in writer.tensors]

    def differs(self, other: Content) -> bool:
        """True if another batch isn't the same to the bit."""
        if self._rest != other._rest or len(self._copies) != len(other._copies):
            return True
        return not all(map(_has_same_bits, self._copies, other._copies))

    def shares_with(self, other: Content) -> bool:
        """True if a batch that was read before has an object, or memory, that this one has."""
        return not self._places.keys().isdisjoint(other._places)

    def read_again(self) -> None:
        """Make the batch again, which raises if its classes don't allow that."""
        _Reader(io.BytesIO(self._rest), self._copies).load()


class _Writer(pickle.Pickler):
    """Writes a batch without its tensors.

    Attributes:
        tensors: These.
        changeable: All of its objects that the script might write into.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, _PROTOCOL)
        self.tensors: list[Tensor] = []
        self.changeable: list[Any] = []

    def persistent_id(self, value: Any) -> Any:
        """Leave tensors out, and note them."""
        if _is_changeable(value):
            self.changeable.append(value)
        if type(value) not in {Tensor, Parameter}:
            return None
        _check(value)
        self.tensors.append(value)
        return len(self.tensors) - 1


def _is_changeable(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, (list, dict, set, bytearray, deque, Tensor)) or _is_array(value):
        return True
    fixed = issubclass(kind, (type, Enum, FunctionType, ModuleType))
    return not fixed and kind.__dictoffset__ != 0


def _is_array(value: Any) -> bool:
    return module_name(type(value)) == "numpy" and type(value).__name__ == "ndarray"


def _places(value: Any) -> Iterator[tuple[str, int]]:
    """Yield what identifies an object, and the memory of its numbers, as long as it exists."""
    yield "object", id(value)
    if isinstance(value, Tensor):
        with suppress(Exception):  # it has no storage
            if value.data_ptr():
                yield "memory", value.data_ptr()
    elif _is_array(value) and value.size:
        yield "memory", value.__array_interface__["data"][0]


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, place: Any) -> Any:
        """Return a tensor that was left out."""
        return self._tensors[place]


def _check(tensor: Tensor) -> None:
    if tensor.requires_grad and not tensor.is_leaf:
        raise TypeError("its autograd graph can't be sent")
    if tensor.is_quantized or tensor.is_nested:  # torch 2.13 makes broken tensors of them
        raise TypeError("a quantized or nested tensor can't be sent")
    if tensor.is_conj() or tensor.is_neg():  # of which torch sends the numbers alone
        raise TypeError("a tensor that is the conjugate or negative of another can't be sent")


def _has_same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    if one.layout is not torch.strided:
        return _has_same_bits(one.to_dense(), other.to_dense())
    return one.stride() == other.stride() and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def packed(batch: Any) -> bytes:
    """Return a batch in bytes, of which the tensors are in shared memory.

    All that can fail fails here: torch's queue would only print it, and the reader wait for ever.

    Raises:
        Exception: It can't be sent.
    """
    written = io.BytesIO()
    _Packer(written, _PROTOCOL).dump(batch)
    return written.getvalue()


def unpacked(data: bytes) -> Any:
    """Return a batch that a worker, which this process has forked, has sent by `packed`."""
    return pickle.loads(data)  # noqa: S301 - as torch's queue does, through the same pipe


class _Packer(ForkingPickler):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._parts: list[tuple[int, int]] = []  # of memory, that were sent without the rest of it

    def reducer_override(self, value: Any) -> Any:
        """Send of a large storage only what a tensor shows."""
        if not isinstance(value, Tensor):
            return NotImplemented
        _check(value)
        if type(value) is not Tensor or value.layout is not torch.strided:
            return NotImplemented
        span = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True)) + 1
        shown = span * value.element_size() if value.numel() else 0
        whole = value.untyped_storage().nbytes()
        if whole > 2 * shown + SMALL:
            value, whole = self._part(value, shown), shown
        _check_room(whole)
        return reduce_tensor(value)  # type: ignore[no-untyped-call]

    def _part(self, value: Tensor, shown: int) -> Tensor:
        begin = value.data_ptr()
        end = begin + shown
        if any(begin < other_end and other < end for other, other_end in self._parts):
            raise TypeError("its tensors share memory")
        self._parts.append((begin, end))
        copied = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return copied.copy_(value.detach()).requires_grad_(value.requires_grad)


def _check_room(needed: int) -> None:
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return
    if found.f_bavail * found.f_frsize < 2 * needed:
        raise MemoryError(f"{SHARED_MEMORY} has no room for it")
