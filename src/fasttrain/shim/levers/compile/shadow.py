"""Compiles in a forked copy of the process, which fills the caches on disk and ends.

The copy has the model, the arguments of the call and all that a graph depends on, such as autocast.
It makes the call compiled, which leaves forward and backward in inductor's and AOTAutograd's
caches. When the process itself compiles the same call later, it only traces it.

What the copy must not do:

- Use the parent's threads, which it hasn't: libgomp would wait for them for ever. So it computes
  with one thread, while the generated code is made for as many as the parent has.
- Touch what it shares with the parent: descriptors are replaced, so that nothing is written twice
  and no pipe stays open, signals do what they do in a new process, and no exit handler runs;
  shared memory and files by name can't be written (`confined`).
- Outlive the parent: the kernel ends it with its parent.

A process whose threads have a device can't be forked: this is for training on CPUs.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fasttrain.shim.hooks import patching
from fasttrain.shim.levers.compile.confined import confine
from fasttrain.shim.levers.compile.unseen import unseen_deprecations, unseen_fork
from fasttrain.shim.process.entry import die_with_launcher

MOST_BYTES = 4096  # of a result, which a pipe takes at once
OOM_SCORE = 1000  # where memory is short the kernel ends the copy, and not the training
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
CLOSED = "the script has closed a descriptor that isn't its own"


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a copy.

    Attributes:
        graphs: Number of graphs that it has compiled.
        seconds: How long it took.
        why: Why it has compiled nothing; empty if it has.
    """

    graphs: int
    seconds: float
    why: str = ""


class Shadow:
    """A forked copy of this process that compiles.

    Args:
        pid: Its process, the leader of a process group of its own.
        reads: The end of a pipe from which its result can be read.
    """

    def __init__(self, pid: int, reads: int) -> None:
        self.pid = pid
        self._reads = reads
        self._pipe = _file_of(reads)
        self._owner = os.getpid()
        self._ended: Result | None = None
        self._closing = threading.RLock()  # a thread of the script's may wait for any child
        self._began_s = time.perf_counter()

    @property
    def seconds(self) -> float:
        """How long ago it began."""
        return time.perf_counter() - self._began_s

    def result(self) -> Result | None:
        """Return what became of it; None while it runs."""
        with self._closing:
            if not self._ended and not self._has_pipe():
                self.kill(CLOSED)
            self._ended = self._ended or self._read()
            return self._ended

    def kill(self, why: str = "") -> None:
        """End it, and the compilers that it has started, if it runs.

        Args:
            why: The reason, for its result.
        """
        with self._closing:
            if os.getpid() == self._owner and self.pid:
                for end in (os.killpg, os.kill):  # the group may not be there yet
                    with suppress(OSError):
                        end(self.pid, signal.SIGKILL)
                self._close()
                self._ended = Result(0, self.seconds, why)

    def _has_pipe(self) -> bool:
        """True if the pipe wasn't closed, as by ``os.closerange``, its number free for a file."""
        return _file_of(self._reads) == self._pipe

    def _read(self) -> Result | None:
        poll = select.poll()
        poll.register(self._reads, select.POLLIN)
        if not poll.poll(0):
            return None
        text = os.read(self._reads, MOST_BYTES)
        status = self._close()
        if not text:
            return Result(0, self.seconds, f"it ended before it had compiled anything{status}")
        told = json.loads(text)
        return Result(int(told["graphs"]), self.seconds, str(told["why"]))

    def _close(self) -> str:
        """Wait for its end, and return how it was ended if it was."""
        if self._has_pipe():
            os.close(self._reads)
        pid, self.pid = self.pid, 0
        try:
            _, status = os.waitpid(pid, 0)
        except ChildProcessError:  # the script waits for any child
            return ""
        if not os.WIFSIGNALED(status):
            return ""
        number = os.WTERMSIG(status)
        wrote = number in (signal.SIGSEGV, signal.SIGBUS)
        return f" (signal {number}{': it may write to shared memory' if wrote else ''})"


def _file_of(descriptor: int) -> tuple[int, int] | None:
    """Return what a descriptor leads to; None if it is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def is_shared(module: Module) -> bool:
    """True if a module has a tensor in shared memory, which a call in a copy could change."""
    return any(
        tensor is not None and _is_shared(tensor)
        for part in Module.modules(module)
        for tensor in (*part._parameters.values(), *part._buffers.values())
    )


def _is_shared(tensor: Any) -> bool:
    # torch says of all tensors on CUDA that they are; is_shared has no annotations.
    return bool(tensor.is_cpu and tensor.is_shared())


def own(value: Any) -> Any:
    """Return arguments of a call without memory that other processes share.

    Batches that a worker of a DataLoader has made are in shared memory: a forward pass that writes
    to its input would write to that of the parent's.
    """
    if isinstance(value, Tensor):
        if not _is_shared(value):
            return value
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in (list, tuple):
        return type(value)(own(item) for item in value)
    if type(value) is dict:
        return {key: own(item) for key, item in value.items()}
    return value


def begin(compile: Callable[[], tuple[int, str]], niceness: int) -> Shadow:
    """Fork a copy of this process that calls a function, and ends.

    Args:
        compile: Called in the copy; returns the number of graphs, and why there is none.
        niceness: How much less important the copy is than this process.

    Raises:
        Exception: No process can be forked, or an audit hook of the script's forbids it.
    """
    import posix  # where it is `fork` itself, also if the script has replaced ``os.fork``

    reads, writes = os.pipe()
    parent = os.getpid()
    threads = torch.get_num_threads()
    try:
        # From Python 3.12 on: "This process is multi-threaded".
        with unseen_deprecations(), unseen_fork():
            pid = posix.fork()
            if pid == 0:
                _end_in_copy(compile, writes, parent, threads, niceness)
    except BaseException:
        os.close(reads)
        os.close(writes)
        raise
    os.close(writes)
    return Shadow(pid, reads)


def _end_in_copy(
    compile: Callable[[], tuple[int, str]], writes: int, parent: int, threads: int, niceness: int
) -> None:
    """Compile, write the result, and end this process in any case."""
    graphs, why = 0, ""
    try:
        _be_apart(writes, parent, niceness)
        _compute_alone(threads)
        graphs, why = compile()
    except BaseException as error:  # noqa: BLE001 - nothing of the script's may run on here
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, PermissionError):
            why += " (a copy of the process, which compiles, writes nothing)"
    finally:
        with suppress(BaseException):
            told = json.dumps({"graphs": graphs, "why": " ".join(why.split())[:500]})
            os.write(writes, told.encode())
        os._exit(0)


def _be_apart(writes: int, parent: int, niceness: int) -> None:
    """Detach this process from all that its parent, in which the script goes on, shares with it."""
    die_with_launcher()
    if os.getppid() != parent:
        os._exit(1)
    os.setpgid(0, 0)
    gc.freeze()  # a loader that is garbage here would end the workers of the parent's
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.nice(niceness)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
        file.write(str(OOM_SCORE))
    nowhere = os.open(os.devnull, os.O_RDWR)
    # Replaced and not closed: what a Python object still has to write goes nowhere, and its number
    # is never that of another file.
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if descriptor not in (writes, nowhere):
            with suppress(OSError):
                os.fstat(descriptor)
                os.dup2(nowhere, descriptor)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    logging.disable(logging.CRITICAL)
    confine()


def _compute_alone(threads: int) -> None:
    """Compute with this thread alone, and compile for as many threads as the parent has."""
    with suppress(AttributeError):  # another OpenMP than libgomp
        ctypes.CDLL(None).omp_set_max_active_levels(0)  # for generated code, which names a number
    torch.set_num_threads(1)
    patching.put(torch, "get_num_threads", lambda: threads, ExitStack())
    # Its own workers would be processes and threads that this one would have to wait for.
    os.environ[COMPILE_THREADS] = "1"
    if config := sys.modules.get("torch._inductor.config"):
        setattr(config, "compile_threads", 1)  # noqa: B010 - a module that mypy doesn't know
