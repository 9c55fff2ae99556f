"""Shows the launcher that this worker makes progress, and writes its Python stacks on request.

A step writes a number into memory that the launcher shares: no system call, no thread. The stacks
are written by faulthandler, from a signal handler in C. So they are written even while the main
thread is in a C call, with or without the interpreter lock. Processes that are forked from this
one, such as DataLoader workers, inherit the handler and its file.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from fasttrain.files import open_log, out_of_the_way, write_private
from fasttrain.model.codec import dumps
from fasttrain.model.hang import (
    HEARTBEATS_VARIABLE,
    MEMORY_BYTES,
    MEMORY_NAME,
    MOST_RANKS,
    RECORD_BYTES,
    HeartbeatAddress,
    Slot,
    stacks_file,
)
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.dynamo import pass_over
from fasttrain.shim.hooks.loop import on_batch
from fasttrain.shim.process import entry

NOT_WATCHED = "fasttrain: this process is not watched for hangs"

_STEPS, _BEATS = int(Slot.STEPS), int(Slot.BEATS)


class Heartbeat:
    """The heartbeat of one process: its record in memory that the launcher reads.

    Args:
        run_dir: The run directory.
        rank: Global rank.
        child: Whether the script started this process, and not the launcher.
    """

    def __init__(self, run_dir: Path, rank: int, *, child: bool) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._pid = os.getpid()
        name = f"heartbeat-{rank}.child-{self._pid}.json" if child else f"heartbeat-{rank}.json"
        self._address_path = run_dir / name
        self._child = child
        # Memory that nobody reads, until `install` has found some to share.
        self._words: Any = memoryview(bytearray(MEMORY_BYTES)).cast("Q")

    def install(self, undo: ExitStack) -> None:
        """Make the record, handle the signal, and write down for the launcher where both are."""
        try:
            self._share(undo)
        except OSError as error:  # no descriptor left, or a lost directory
            warning = f"{NOT_WATCHED}: {error}"
            print(warning, file=sys.stderr)  # noqa: T201 - a worker has no other channel
            return
        on_batch(self.beat, undo)
        _count_collectives(self.beat, undo)

    def step(self, steps: int) -> None:
        """Record the number of optimizer steps, and progress."""
        self._words[_STEPS] = steps
        self._words[_BEATS] += 1  # a forked child may write the same number as its parent

    def beat(self, *_: Any) -> None:
        """Record progress of another kind than a step."""
        self._words[_BEATS] += 1

    def slow_step(self, p95_s: float) -> None:
        """Record how long a slow step takes, in seconds."""
        self._words[Slot.P95_NS] = int(p95_s * 1e9)

    def end(self) -> None:
        """Record that the script has ended; does nothing in its forked children.

        A script may start any number of children, so none leaves its address.
        """
        if os.getpid() != self._pid:
            return
        self._words[Slot.ENDED] = 1
        if self._child:
            with suppress(OSError):
                self._address_path.unlink(missing_ok=True)

    def _share(self, undo: ExitStack) -> None:
        record = 0 if self._child else _number(entry.get("LOCAL_RANK"))
        descriptor = -1 if self._child else _launchers_memory()
        if descriptor < 0 or record >= MOST_RANKS:
            descriptor, record = os.memfd_create(MEMORY_NAME), 0
            os.ftruncate(descriptor, MEMORY_BYTES)
        descriptor = out_of_the_way(descriptor)
        undo.callback(os.close, descriptor)
        memory = memoryview(mmap.mmap(descriptor, MEMORY_BYTES)).cast("Q")
        first = record * RECORD_BYTES // memory.itemsize
        self._words = memory[first : first + len(Slot)]
        self._words[Slot.RANK] = self._rank + 1
        signum = _free_signal()
        if signum:
            path = self._run_dir / stacks_file(self._rank)
            stacks = out_of_the_way(open_log(path))
            undo.callback(os.close, stacks)
            faulthandler.register(signum, stacks, all_threads=True, chain=False)
            undo.callback(faulthandler.unregister, signum)
        address = HeartbeatAddress(self._rank, self._pid, descriptor, record, signum)
        write_private(self._address_path, dumps(address), durable=False)


def _launchers_memory() -> int:
    """Return a descriptor of the memory that the launcher holds for its ranks; -1 if none."""
    pid, _, number = os.environ.get(HEARTBEATS_VARIABLE, "").partition(":")
    if not (pid.isdecimal() and number.isdecimal()):
        return -1
    link = Path(f"/proc/{pid}/fd/{number}")
    try:
        # The launcher may have ended, and another process may have its pid by now.
        if not str(link.readlink()).startswith(f"/memfd:{MEMORY_NAME}"):
            return -1
        return os.open(link, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1


def _number(word: str) -> int:
    return int(word) if word.isdecimal() else 0


def _free_signal() -> int:
    """Return the highest real-time signal that nobody handles; 0 if all are handled."""
    for signum in range(int(signal.SIGRTMAX), int(signal.SIGRTMIN) - 1, -1):
        if signal.getsignal(signum) is signal.SIG_DFL:
            return signum
    return 0


def _count_collectives(beat: Any, undo: ExitStack) -> None:
    """Call ``beat`` for each collective that Python waits for; those of DDP are part of a step.

    By a property: it returns the method and is gone when that is called, so that a collective that
    fails has no frame of fasttrain's in its traceback.
    """
    if not torch.distributed.is_available():
        return
    work: Any = torch.distributed.Work
    wait = vars(work)["wait"]

    def read(handle: Any) -> Any:
        beat()
        return wait.__get__(handle)

    pass_over(read, all_it_calls=True)
    patching.put(work, "wait", property(read), undo)
