"""Packs messages of a DataLoader's workers into anonymous memory files (memfd).

A message is pickled; the bytes of its dense tensors and buffers (NumPy arrays) follow the pickle,
where a reader maps them. Tensors that share memory also share it in the reader, and keep their
strides.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import mmap
import os
import pickle
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes, like torch's CPU allocator
MAPPED = 1 << 20  # bytes from which a file is mapped instead of copied; each map keeps a file open
SPARSE = 4  # a view that spans this many times its own bytes is copied first
PROTOCOL = 5
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_HEAD = struct.Struct("<QQ")  # bytes of the table and of the pickle, which follow in this order
_NOWHERE = -1  # the region of a tensor without elements


@dataclass(frozen=True, slots=True)
class _Found:
    """A tensor of a message, and the addresses between which its elements lie."""

    tensor: Tensor
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Table:
    """The layout of a file.

    Attributes:
        regions: The offset and size of each, in bytes.
        tensors: The region of each tensor, and its own offset in there, in elements.
        buffers: The offset and size of each, in bytes.
    """

    regions: list[tuple[int, int]] = field(default_factory=list)
    tensors: list[tuple[int, int]] = field(default_factory=list)
    buffers: list[tuple[int, int]] = field(default_factory=list)


class _Pickler(pickle.Pickler):
    """Pickles a dense tensor as its place in the file, without its bytes."""

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, PROTOCOL, buffer_callback=buffers.append)
        self.found: list[_Found] = []

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or not _is_plain(value):
            return NotImplemented
        tensor, (begin, end) = value, _span(value)
        sparse = end - begin > SPARSE * max(value.nbytes, ALIGNMENT)
        if sparse or begin % value.element_size():
            tensor = value.detach().clone(memory_format=torch.contiguous_format)
            begin, end = _span(tensor)
        self.found.append(_Found(tensor, begin, end))
        form = tensor.dtype, tuple(tensor.shape), tensor.stride(), value.requires_grad
        return _placed, (len(self.found) - 1, *form)


def _is_plain(tensor: Tensor) -> bool:
    """True if a tensor is a plain dense one on the CPU, without a graph, hooks or attributes."""
    strided = tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not strided or tensor.is_quantized or tensor.is_nested or tensor.grad_fn is not None:
        return False
    return not (vars(tensor) or tensor._backward_hooks or tensor.is_conj() or tensor.is_neg())


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses between which a tensor's elements lie; 0, 0 for no elements."""
    if not tensor.numel():
        return 0, 0
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (reach + 1) * tensor.element_size()


# --- into a file


def packed(message: Any) -> int:
    """Return the descriptor of a sealed memory file that holds a message.

    Raises:
        OSError: If memory is exhausted.
        Exception: Whatever pickle raises for an object that can't be pickled.
    """
    stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    pickler = _Pickler(stream, buffers)
    pickler.dump(message)
    views = [buffer.raw() for buffer in buffers]
    descriptor = os.memfd_create("fasttrain", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _write(descriptor, stream.getbuffer(), pickler.found, views)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _write(
    descriptor: int, stream: memoryview, found: list[_Found], views: Sequence[memoryview]
) -> None:
    table, memories, at = _Table(), list[tuple[int, Any]](), 0
    for begin, end in _regions(found, table):
        before = begin % ALIGNMENT  # padding that keeps the first element's alignment
        memories.append((at + before, (ctypes.c_char * (end - begin)).from_address(begin)))
        table.regions.append((at, before + end - begin))
        at = _aligned(at + before + end - begin)
    for view in views:
        memories.append((at, view))
        table.buffers.append((at, view.nbytes))
        at = _aligned(at + view.nbytes)
    index = pickle.dumps((table.regions, table.tensors, table.buffers), PROTOCOL)
    front = _HEAD.pack(len(index), stream.nbytes) + index
    first = _aligned(len(front) + stream.nbytes)
    _put(descriptor, front, 0)
    _put(descriptor, stream, len(front))
    os.ftruncate(descriptor, first + at)
    for offset, memory in memories:
        _put(descriptor, memory, first + offset)


def _regions(found: list[_Found], table: _Table) -> list[tuple[int, int]]:
    """Return the memory regions of tensors, as addresses; overlapping tensors share one.

    Args:
        found: The tensors.
        table: Receives each tensor's place.
    """
    regions: list[tuple[int, int]] = []
    table.tensors.extend([(_NOWHERE, 0)] * len(found))
    for number in sorted(range(len(found)), key=lambda n: found[n].begin):
        one = found[number]
        if one.begin == one.end:
            continue
        if regions and one.begin < regions[-1][1]:
            first, end = regions[-1]
            regions[-1] = (first, max(end, one.end))
        else:
            regions.append((one.begin, one.end))
        inside = one.begin - regions[-1][0] // ALIGNMENT * ALIGNMENT
        table.tensors[number] = (len(regions) - 1, inside // one.tensor.element_size())
    return regions


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _put(descriptor: int, content: Any, at: int) -> None:
    view = memoryview(content).cast("B")
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written


# --- out of a file

_READING = threading.local()  # regions and table of the message that a thread reads


def unpacked(descriptor: int) -> Any:
    """Return the message in a file; its memory is private to this process.

    Args:
        descriptor: The file's; the caller closes it.
    """
    memory = _memory(descriptor)
    table_size, stream_size = _HEAD.unpack_from(memory)
    begin = _HEAD.size + table_size
    whole = memoryview(memory)
    table = _Table(*pickle.loads(whole[_HEAD.size : begin]))  # noqa: S301 - from a process of this user, which `node` checks
    first = _aligned(begin + stream_size)
    buffers = [whole[first + at : first + at + size] for at, size in table.buffers]
    regions = [
        torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=first + at)
        for at, size in table.regions
    ]
    _READING.message = regions, table.tensors
    try:
        return pickle.loads(whole[begin : begin + stream_size], buffers=buffers)  # noqa: S301 - as above
    finally:
        del _READING.message


def _memory(descriptor: int) -> mmap.mmap:
    size = os.fstat(descriptor).st_size
    if size >= MAPPED:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        return mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=access)
    memory = mmap.mmap(-1, size)
    at = 0
    while at < size:
        at += os.preadv(descriptor, [memoryview(memory)[at:]], at)
    return memory


def _placed(
    number: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> Tensor:
    regions, places = _READING.message
    region, offset = places[number]
    if region == _NOWHERE:
        tensor = torch.empty_strided(shape, stride, dtype=dtype)
    else:
        tensor = torch.empty(0, dtype=dtype)
        tensor.set_(regions[region].untyped_storage(), offset, shape, stride)
    return tensor.requires_grad_() if requires_grad else tensor
