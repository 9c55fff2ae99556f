"""Messages between the ranks of a node: memory files, whose descriptors go over sockets."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import io
import mmap
import os
import pickle
import secrets
import socket
import struct
import threading
import weakref
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.process import entry

# Packs messages of a DataLoader's workers into anonymous memory files (memfd).
#
# A message is pickled; the bytes of its dense tensors and buffers (NumPy arrays) follow the
# pickle, where a reader maps them. Tensors that share memory also share it in the reader, and
# keep their strides.


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
        # Several ranks map the file: none of them, nor the worker, may change it from now on.
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
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    else:
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        tensor.set_(regions[region].untyped_storage(), offset, shape, stride)
    return tensor.requires_grad_() if requires_grad else tensor


# The sockets through which the first rank of a node sends file descriptors to the others.
#
# They have abstract names, so that no file remains. Any user of the machine can connect to such a
# name, so that both sides check whose process is at the other end.


CONNECT_S = 10.0
MOST_BYTES = 4096  # per packet
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_ROOM = socket.CMSG_SPACE(4 * struct.calcsize("i"))  # for descriptors
_NUMBER = struct.Struct("<i")
_OPEN: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def can_be_had() -> bool:
    """True if this system supports it: Linux does."""
    needed = (socket, "SO_PEERCRED"), (socket, "SOCK_SEQPACKET"), (os, "memfd_create")
    return all(hasattr(owner, name) for owner, name in needed)


def own(line: socket.socket) -> socket.socket:
    """Return a socket that will be closed in forked children."""
    _close_in_children()
    _OPEN.add(line)
    return line


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def listening() -> tuple[socket.socket, str]:
    """Return a listening socket and its name."""
    listener = own(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    name = f"fasttrain-{secrets.token_hex(16)}"
    listener.bind(f"\0{name}")
    listener.listen(128)
    listener.settimeout(CONNECT_S)
    return listener, name


def accepted(listener: socket.socket) -> tuple[socket.socket, int]:
    """Return a socket to a process of this user that has connected, and its rank.

    Raises:
        OSError: If none connects in time.
    """
    while True:
        line, _ = listener.accept()
        line.settimeout(CONNECT_S)
        if is_same_users(line):
            line, rank = own(line), _NUMBER.unpack(line.recv(_NUMBER.size))[0]
            line.settimeout(None)
            return line, rank
        line.close()


def connected(name: str, rank: int) -> socket.socket:
    """Return a socket to the process of this user that listens by a name.

    Raises:
        OSError: If there is none, or it is another user's.
    """
    line = own(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    line.settimeout(CONNECT_S)
    line.connect(f"\0{name}")
    if not is_same_users(line):
        line.close()
        raise PermissionError("the socket is another user's")
    line.send(_NUMBER.pack(rank))
    line.settimeout(None)
    return line


def is_same_users(line: socket.socket) -> bool:
    """True if the process at the other end is this user's."""
    found = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())


def send(line: socket.socket, packet: bytes, *descriptors: int) -> None:
    """Send one packet with descriptors, which the sender keeps.

    Raises:
        OSError: If the other end is closed.
    """
    line.sendmsg([packet], _rights(descriptors))


def receive(line: socket.socket, flags: int = 0) -> tuple[bytes, list[int]]:
    """Return one packet and its descriptors; an empty one after the last.

    Raises:
        OSError: If there is none yet, with a non-blocking flag or a timeout.
    """
    while True:
        # Raised once if the other side left unread packets; those that it has sent come after it.
        # Not socket.recv_fds, which ignores its flags (Python 3.11).
        packet, rights, _, _ = line.recvmsg(MOST_BYTES, _ROOM, flags | socket.MSG_CMSG_CLOEXEC)
        return packet, _descriptors(rights)


def _rights(descriptors: tuple[int, ...]) -> list[tuple[int, int, Any]]:
    if not descriptors:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))]


def _descriptors(rights: list[tuple[int, int, bytes]]) -> list[int]:
    found = array("i")
    for level, kind, content in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(content[: len(content) - len(content) % found.itemsize])
    return list(found)


def close(*lines: socket.socket) -> None:
    """Shut sockets down, even if a forked child still holds them, and close them."""
    for line in lines:
        with suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)
        line.close()


@functools.cache
def _close_in_children() -> None:
    def in_child() -> None:
        for line in list(_OPEN):
            line.close()

    os.register_at_fork(after_in_child=in_child)


LOOK_S = 0.5
_CALL_NUMBER = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Node:
    """This rank's sockets to other ranks of its node.

    Attributes:
        first: The global rank of the node's first rank, which reads.
        is_first: True if that is this rank.
        lines: On the first rank, sockets to all others in the order of ranks; else to the first.
    """

    first: int
    is_first: bool
    lines: tuple[socket.socket, ...]

    def begin(self, number: int) -> list[socket.socket]:
        """Return new sockets to the other ranks for the next loader that the first rank reads.

        Args:
            number: Number of the loader, counted alike on all ranks.

        Raises:
            RuntimeError: If the first rank has ended, or reads another loader.
        """
        if self.is_first:
            return [_handed(line, number) for line in self.lines]
        packet, descriptors = receive(self.lines[0])
        if not descriptors or _CALL_NUMBER.unpack(packet)[0] != number:
            raise RuntimeError(f"rank {self.first} reads another DataLoader, or has ended")
        return [own(socket.socket(fileno=descriptors[0]))]


def _handed(line: socket.socket, number: int) -> socket.socket:
    here, there = pair()
    # A rank that has ended is noticed when this one waits for it.
    with there, suppress(OSError):
        send(line, _CALL_NUMBER.pack(number), there.fileno())
    return own(here)


def met(ranks: Ranks) -> Node | None:
    """Connect to the other ranks of the node; every rank must call this.

    Returns:
        None on all ranks if some ranks of a node can't send each other descriptors.
    """
    first, size = _first_and_size(ranks)
    store: Any = ranks.store
    with ranks.waits():
        found = _lines(ranks, first, size)
        if found is None:
            store.set("loaders/all", "no")
        elif store.add("loaders/met", 1) == ranks.world_size:
            store.set("loaders/all", "yes")
        together = store.get("loaders/all") == b"yes"
    if not together or found is None:
        close(*(found or ()))
        return None
    return Node(first, ranks.rank == first, tuple(found))


def _first_and_size(ranks: Ranks) -> tuple[int, int]:
    size = int(entry.get("LOCAL_WORLD_SIZE", "1"))
    local_rank = int(entry.get("LOCAL_RANK", str(ranks.rank % size)))
    return ranks.rank - local_rank, size


def _lines(ranks: Ranks, first: int, size: int) -> list[socket.socket] | None:
    store, key = ranks.store, f"loaders/{first}"
    if ranks.rank != first:
        name = store.get(key).decode()
        try:
            return [connected(name, ranks.rank)] if name else None
        except OSError:  # another network namespace
            return None
    if size == 1:
        return []
    try:
        listener, name = listening()
    except (OSError, AttributeError):  # the system has no such sockets
        listener, name = None, ""
    store.set(key, name)
    if listener is None:
        return None
    with listener:
        return _come(listener, store, size - 1)


def _come(listener: socket.socket, store: Any, count: int) -> list[socket.socket] | None:
    """Accept the other ranks' connections; None if one of them fails to connect."""
    come: dict[int, socket.socket] = {}
    listener.settimeout(LOOK_S)
    while len(come) < count:
        try:
            line, rank = accepted(listener)
        except OSError:
            if store.check(["loaders/all"]):
                close(*come.values())
                return None
        else:
            come[rank] = line
    return [come[rank] for rank in sorted(come)]
