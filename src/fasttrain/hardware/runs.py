"""The runs of this user on this machine, also those whose launcher is dead."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from fasttrain.hardware.orphans import RunProcess, as_device_process, find_run_processes
from fasttrain.model.local_run import LocalRun, RunState
from fasttrain.processes.launchers import Launcher, launchers
from fasttrain.processes.table import mark_of, of_run


def find_runs(run_root: Path, held_bytes: Mapping[int, int], receipt: str) -> tuple[LocalRun, ...]:
    """Give the runs, the oldest first; found by the marks of their processes, and their launchers.

    Args:
        run_root: Where run directories are made.
        held_bytes: Device memory by process.
        receipt: Name of the file that a run leaves at its end.
    """
    known = find_run_processes(run_root)
    led = launchers()
    names = led.keys() | {mark for pid in known if (mark := mark_of(pid))}
    runs = [_run(name, known, held_bytes, run_root, receipt, led.get(name)) for name in names]
    there = (run for run in runs if run.processes or run.launcher)
    return tuple(sorted(there, key=lambda run: run.started_s))


def _run(
    name: str,
    known: Mapping[int, RunProcess],
    held_bytes: Mapping[int, int],
    run_root: Path,
    receipt: str,
    launcher: Launcher | None,
) -> LocalRun:
    pids = sorted(of_run(name))
    told = (as_device_process(pid, held_bytes.get(pid, 0), known) for pid in pids)
    named = [str(launcher.run_dir)] if launcher else []
    named += [known[pid].run for pid in pids if pid in known]
    run_dir = _directory(name, named, pids, run_root)
    led = bool(launcher) or any(not known[pid].orphan for pid in pids if pid in known)
    leader = launcher.process.pid if launcher else 0
    state: RunState = "running" if led else "orphaned"
    if not led and run_dir and Path(run_dir, receipt).is_file():
        state = "finished"
    return LocalRun(
        run_id=name,
        state=state,
        started_s=min(map(_started_s, (*pids, leader) if leader else pids), default=0.0),
        processes=tuple(process for process in told if process.pid),
        run_dir=run_dir,
        launcher=leader,
    )


def _directory(name: str, told: list[str], pids: list[int], run_root: Path) -> str:
    """Give the run directory: one that was told, or the default one for some process."""
    for run in told:
        if Path(run).is_absolute():
            return run
    for pid in pids:
        with suppress(psutil.Error):
            default = Path(psutil.Process(pid).cwd(), run_root.name, name)
            if default.is_dir():
                return str(default)
    return ""


def _started_s(pid: int) -> float:
    with suppress(psutil.Error):
        return psutil.Process(pid).create_time()
    return float("inf")  # it has ended, and says nothing of the others
