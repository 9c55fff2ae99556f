"""Reads the progress of this node's ranks from memory that they share with the launcher."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fasttrain.files import load
from fasttrain.model.codec import CodecError
from fasttrain.model.hang import (
    HEARTBEATS_VARIABLE,
    MEMORY_BYTES,
    MEMORY_NAME,
    MOST_RANKS,
    RECORD_BYTES,
    HeartbeatAddress,
    Slot,
)
from fasttrain.model.outcome import RankReport

CHILD = ".child-"  # in the name of an address that a process of the script's has left


@dataclass(frozen=True, slots=True)
class HeartbeatRecord:
    """The heartbeat of one process of a rank.

    Attributes:
        address: The process.
        steps: Its optimizer steps.
        beats: A count of its other signs of life.
        p95_s: 95th percentile of its step times, in s; 0 where unknown.
        ended: Whether its script has ended.
    """

    address: HeartbeatAddress
    steps: int
    beats: int
    p95_s: float
    ended: bool


class RankMemory:
    """Memory that the ranks of this node write into; this process holds it, so it outlives them.

    Where it can't be created, each rank creates its own.
    """

    def __init__(self) -> None:
        self._descriptor = -1
        self._memory: mmap.mmap | None = None
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or no descriptor left
            self._descriptor = os.memfd_create(MEMORY_NAME)
            os.ftruncate(self._descriptor, MEMORY_BYTES)
            self._memory = mmap.mmap(self._descriptor, MEMORY_BYTES)

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the ranks, with the variable by which they find the memory."""
        others = {name: value for name, value in environ.items() if name != HEARTBEATS_VARIABLE}
        if self._memory is None:
            return others
        return {**others, HEARTBEATS_VARIABLE: f"{os.getpid()}:{self._descriptor}"}

    def steps(self) -> dict[int, int]:
        """Return the optimizer steps of each rank that has started, by global rank."""
        if self._memory is None:
            return {}
        records = (_words(self._memory, record) for record in range(MOST_RANKS))
        return {words[Slot.RANK] - 1: words[Slot.STEPS] for words in records if words[Slot.RANK]}

    def clear(self) -> None:
        """Clear the records of ranks, all of which have ended."""
        if self._memory is not None:
            self._memory[:] = bytes(MEMORY_BYTES)

    def close(self) -> None:
        """Release the memory."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class HeartbeatRecords:
    """The heartbeats of all processes that have left their address in a run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._memories: dict[HeartbeatAddress, mmap.mmap] = {}

    def find(self) -> None:
        """Find new processes, and forget those that have ended."""
        alive = set()
        for path, address in self._addresses():
            if _is_alive(address):
                alive.add(address)
            elif CHILD in path.name:  # a killed one: a script may start any number of them
                with contextlib.suppress(OSError):
                    path.unlink()
        for address in self._memories.keys() - alive:
            self._memories.pop(address).close()
        for address in alive - self._memories.keys():
            if (memory := _mapped(address)) is not None:
                self._memories[address] = memory

    def read(self) -> tuple[HeartbeatRecord, ...]:
        """Return the present heartbeat of each process."""
        return tuple(_heartbeat(address, memory) for address, memory in self._memories.items())

    def close(self) -> None:
        """Release all of them."""
        for memory in self._memories.values():
            memory.close()
        self._memories = {}

    def _addresses(self) -> Iterator[tuple[Path, HeartbeatAddress]]:
        for path in self._run_dir.glob("heartbeat-*.json"):
            # Renamed into place, so never partial; a file of an older worker is replaced.
            with contextlib.suppress(OSError, CodecError):
                address = load(HeartbeatAddress, path)
                if 0 <= address.record < MOST_RANKS:
                    yield path, address


def _link(address: HeartbeatAddress) -> str:
    return f"/proc/{address.pid}/fd/{address.descriptor}"


def _is_alive(address: HeartbeatAddress) -> bool:
    try:
        # Another process may have got the same number since.
        return str(Path(_link(address)).readlink()).startswith(f"/memfd:{MEMORY_NAME}")
    except OSError:
        return False


def _mapped(address: HeartbeatAddress) -> mmap.mmap | None:
    try:
        descriptor = os.open(_link(address), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # it has ended just now
        return None
    try:
        return mmap.mmap(descriptor, MEMORY_BYTES, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)


def _heartbeat(address: HeartbeatAddress, memory: mmap.mmap) -> HeartbeatRecord:
    words = _words(memory, address.record)
    return HeartbeatRecord(
        address=address,
        steps=words[Slot.STEPS],
        beats=words[Slot.BEATS],
        p95_s=words[Slot.P95_NS] / 1e9,
        ended=bool(words[Slot.ENDED]),
    )


def _words(memory: mmap.mmap, record: int) -> tuple[int, ...]:
    return struct.unpack_from(f"{len(Slot)}Q", memory, record * RECORD_BYTES)


# How many optimizer steps each rank of this node has made, also after it has ended.


LOOK_S = 1.0


class Progress:
    """The optimizer steps of each rank, from its heartbeats and from its report."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._heartbeats = HeartbeatRecords(run_dir)
        self._memory = RankMemory()
        self._steps: dict[int, int] = {}
        self._looked_s = time.monotonic() - LOOK_S

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the ranks, by which they share their steps."""
        return self._memory.environ(environ)

    def tick(self) -> None:
        """Find processes that ranks have started, once a second."""
        if time.monotonic() - self._looked_s < LOOK_S:
            return
        self._looked_s = time.monotonic()
        self._read()  # before processes that have ended are forgotten
        self._heartbeats.find()

    def steps(self) -> dict[int, int]:
        """Return the steps by rank; a rank that trains in child processes has theirs."""
        self._read()
        for path in self._run_dir.glob("rank-*.json"):
            try:
                report = load(RankReport, path)
            except (OSError, CodecError):  # the receipt reports it
                continue
            stats = report.stats
            # As heartbeats count: the steps before a snapshot were made by an earlier run
            self._note(report.rank, stats.steps if stats.steps > stats.resumed_from else 0)
        return dict(self._steps)

    def begin_again(self) -> None:
        """Forget the previous attempt, all of whose processes have ended."""
        self._heartbeats.close()
        self._memory.clear()
        self._steps = {}

    def close(self) -> None:
        """Release the ranks' memory."""
        self._heartbeats.close()
        self._memory.close()

    def _read(self) -> None:
        for rank, steps in self._memory.steps().items():
            self._note(rank, steps)
        for heartbeat in self._heartbeats.read():
            self._note(heartbeat.address.rank, heartbeat.steps)

    def _note(self, rank: int, steps: int) -> None:
        self._steps[rank] = max(self._steps.get(rank, 0), steps)
