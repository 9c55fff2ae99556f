"""The lowest places at which fasttrain starts and finds processes, each with a stand-in.

What would have been started is recorded, and ``true`` is started in its place, so that all that
stands around it (pipes, waiting, the reading of answers) is the real thing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import fasttrain.processes.launchers
import fasttrain.processes.table
from fasttrain.launch.process.supervise import PROGRAM as GUARDIAN

CPU_S, WALL_S = 2.0, 20.0  # the second one for a machine that is busy with something else


class Recorder:
    """Takes what would have been started.

    Attributes:
        started: The command lines, but for those of guardians.
        problems: What was wrong with any.
        exit_code: What programs of a run end with: 0 or 1.
        answers: What tools print, by name.
        on_start: Called when a run's program is started, as if that did it.
    """

    def __init__(self) -> None:
        self.started: list[list[str]] = []
        self.problems: list[str] = []
        self.exit_code = 0
        self.answers: dict[str, str] = {}
        self.on_start: Callable[[], None] = lambda: None

    def check(self, argv: Any, environ: Any) -> None:
        """See that the kernel could take these words byte for byte."""
        words = list(argv)
        if isinstance(argv, str) or not all(isinstance(word, str | os.PathLike) for word in words):
            self.problems.append(f"not a list of texts: {argv!r}")
        elif any(b"\0" in os.fsencode(word) for word in words):
            self.problems.append(f"NUL in {argv!r}")
        for name, value in (environ or {}).items():
            if "=" in name or b"\0" in os.fsencode(name) + os.fsencode(value):
                self.problems.append(f"no variable: {name!r}={value!r}")
        if str(GUARDIAN) not in words:
            self.started.append([str(word) for word in words])

    def stand_in(self, argv: Sequence[Any]) -> list[str]:
        """Return what is started instead."""
        for word in argv[:4]:  # `timeout 60 sbatch` too
            if (answer := self.answers.get(Path(str(word)).name)) is not None:
                return ["/bin/echo", "-n", answer]
        return ["/bin/false" if self.exit_code else "/bin/true"]


def install(patch: pytest.MonkeyPatch) -> Recorder:
    """Put the stand-ins into place."""
    recorder, spawn = Recorder(), os.posix_spawn

    class RecordedPopen(subprocess.Popen[Any]):
        def __init__(self, args: Any, *rest: Any, **options: Any) -> None:
            if options.get("shell"):
                recorder.problems.append(f"by a shell: {args!r}")
            recorder.check(args, options.get("env"))
            super().__init__(recorder.stand_in(args), *rest, **options)

    def recorded_spawn(program: str, argv: Any, environ: Any, **options: Any) -> int:
        recorder.check([program, *argv], environ)
        guardian = str(GUARDIAN) in argv
        if not guardian:
            recorder.on_start()
        return spawn("/bin/true" if guardian else recorder.stand_in(argv)[0], ["-"], {}, **options)

    patch.setattr(subprocess, "Popen", RecordedPopen)
    patch.setattr(os, "posix_spawn", recorded_spawn)
    _keep_to_own_children(patch, recorder)
    return recorder


def _keep_to_own_children(patch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    """See to it that no line sees, or ends, the runs of anybody who works on this machine."""
    own, kill, send = psutil.Process(), os.kill, signal.pidfd_send_signal

    def is_ours(pid: int) -> bool:
        return pid in {child.pid for child in own.children(recursive=True)}

    def may_reach(pid: int, number: int) -> bool:
        if pid == own.pid or is_ours(pid):
            return True
        recorder.problems.append(f"signal {number} to process {pid} of somebody else")
        return False

    def recorded_kill(pid: int, number: int) -> None:
        if may_reach(pid, number):
            kill(pid, number)

    def recorded_send(descriptor: int, number: int) -> None:
        about = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        if may_reach(int(about.rpartition("\nPid:")[2].split()[0]), number):
            send(descriptor, number)

    patch.setattr(psutil, "process_iter", lambda: own.children(recursive=True))
    for module in (fasttrain.processes.table, fasttrain.processes.launchers):
        patch.setattr(module, "is_own", is_ours)
    patch.setattr(os, "kill", recorded_kill)
    patch.setattr(signal, "pidfd_send_signal", recorded_send)


@contextmanager
def watchdog(interrupt: Callable[[], None]) -> Iterator[Callable[[], list[str]]]:
    """Interrupt what takes too long; gives a function that tells of it and starts the time anew."""
    begun, late, ended = [_now()], list[str](), threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            cpu_s, wall_s = (now - then for now, then in zip(_now(), begun[0], strict=True))
            if cpu_s > CPU_S or wall_s > WALL_S:
                late.append(f"it took {cpu_s:.1f} s of processor time, {wall_s:.1f} s in all")
                begun[0] = _now()
                interrupt()

    def told() -> list[str]:
        found, late[:] = list(late), []
        begun[0] = _now()
        return found

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield told
    finally:
        ended.set()
        thread.join()


def _now() -> tuple[float, float]:
    return time.process_time(), time.monotonic()
