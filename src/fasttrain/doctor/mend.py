"""What ``doctor --fix`` does: nothing that a user couldn't undo or wouldn't want."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from fasttrain.hardware.orphans import find_run_processes, run_of
from fasttrain.planning.describe import counted
from fasttrain.spec.examination import Examination

GRACE_S = 5.0  # between being asked to end and being ended


def end_orphans(_seen: Examination) -> str:
    """End the workers of runs whose launcher is dead, and give what was done in one line.

    Looked for anew, because a number may belong to another process by now; and workers alone: what
    a script started beside them, such as TensorBoard, may have been left running on purpose.
    """
    runs = find_run_processes(Path())
    orphans = [pid for pid, run in runs.items() if run.orphan]
    processes = [process for pid in orphans if (process := _worker(pid))]
    for process in processes:
        with suppress(psutil.Error):
            process.terminate()
    _, stubborn = psutil.wait_procs(processes, timeout=GRACE_S)
    for process in stubborn:
        with suppress(psutil.Error):
            process.kill()
    _, alive = psutil.wait_procs(stubborn, timeout=GRACE_S)
    left = [str(process.pid) for process in alive]
    ended = [str(process.pid) for process in processes if process not in alive]
    told = (
        f"ended {counted(len(ended), 'worker')} of dead runs: {', '.join(ended)}" if ended else ""
    )
    stuck = f"could not end {', '.join(left)}" if left else ""
    return "; ".join(part for part in (told, stuck) if part) or "no worker of a dead run is left"


def _worker(pid: int) -> psutil.Process | None:
    """Give a process if it is a worker: one with a plan on its command line."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if run_of(process.cmdline(), {}, Path()):
            return process
    return None
