"""Ending the workers of dead runs, with real processes."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fasttrain.doctor.checks import devices
from fasttrain.doctor.checks.devices import NOTHING_LEFT
from fasttrain.hardware.runs import RunProcess
from fasttrain.model.machine import Cpu, Examination, Machine, Torch

SEEN = Examination(Machine("node", "Linux", "3.11.9", Torch(), Cpu("x", 1, "all")))
WORKER = ("-c", "import time; time.sleep(60)", "/x/fasttrain/shim/__main__.py", "/runs/a/plan.json")


@contextmanager
def workers(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Return processes that look like a run's workers."""
    started = [subprocess.Popen([sys.executable, *WORKER]) for _ in range(count)]
    try:
        # exec() closes the pipe that Popen waits at before the new command line can be read.
        while not all(Path(f"/proc/{process.pid}/cmdline").read_bytes() for process in started):
            time.sleep(0.01)
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("count", "told"), [(1, r".* 1 worker .*: "), (2, r".* 2 workers .*: "), (0, NOTHING_LEFT)]
)
def test_what_was_ended_is_counted(monkeypatch: pytest.MonkeyPatch, count: int, told: str) -> None:
    with workers(count) as started:
        runs = {process.pid: RunProcess("/runs/a", orphan=True) for process in started}
        monkeypatch.setattr(devices, "find_run_processes", lambda _: runs)
        said = devices.end_orphans(SEEN)
        name = Path(sys.executable).name
        ended = ", ".join(f"{name} (pid {process.pid})" for process in started)
        assert re.fullmatch(told + re.escape(ended), said)
        assert all(process.poll() is not None for process in started)
