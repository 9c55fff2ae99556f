"""What ``doctor --fix`` does: nothing that a user couldn't undo or wouldn't want."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from fasttrain.hardware.runs import find_run_processes, run_of
from fasttrain.model.examination import Examination
from fasttrain.planning.describe import counted
from fasttrain.processes.ending import end, named
from fasttrain.processes.table import alive, look_up

NOTHING_LEFT = "no worker of a dead run is left"
GRACE_S = 5.0  # between being asked to end and being ended


def end_orphans(_seen: Examination) -> str:
    """End the workers of runs whose launcher is dead, and give what was done in one line.

    Looked for anew, because a number may belong to another process by now; and workers alone: what
    a script started beside them, such as TensorBoard, may have been left running on purpose.
    """
    runs = find_run_processes(Path())
    orphans = [pid for pid, run in runs.items() if run.orphan and _is_worker(pid)]
    workers = [process for pid in orphans if (process := look_up(pid))]
    done = end(lambda: alive(workers), GRACE_S)
    told = ""
    if done.ended:
        told = f"ended {counted(len(done.ended), 'worker')} of dead runs: {named(done.ended)}"
    stuck = f"could not end {named(done.left)}" if done.left else ""
    return "; ".join(part for part in (told, stuck) if part) or NOTHING_LEFT


def _is_worker(pid: int) -> bool:
    """Return whether a process is a worker: one with a plan on its command line."""
    with suppress(psutil.Error):
        return bool(run_of(psutil.Process(pid).cmdline(), {}, Path()))
    return False
