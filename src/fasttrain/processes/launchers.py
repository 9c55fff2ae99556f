"""Find the launchers on this machine by the locks that they hold, and end runs through them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fasttrain.files import load
from fasttrain.model.codec import CodecError
from fasttrain.model.places import LOCK_FILE
from fasttrain.model.plan import PLAN_FILE, LaunchPlan
from fasttrain.processes.table import (
    DEATH_S,
    Ended,
    Process,
    alive,
    ancestors,
    command_of,
    end,
    is_own,
    of_run,
    send,
    table,
)

RECEIPT_S = DEATH_S  # time for a launcher to write the receipt once its run has ended


class Launcher(NamedTuple):
    """The launcher of one run.

    Attributes:
        process: The process.
        run_dir: The directory of its run.
    """

    process: Process
    run_dir: Path


def launchers() -> dict[str, Launcher]:
    """Return this user's launchers by the names of their runs, without this process's ancestors.

    Between two attempts, the launcher is the only process of its run.
    """
    processes = table()
    spared = ancestors(os.getpid(), processes)
    own = [one for one in processes.values() if one.pid not in spared and is_own(one.pid)]
    found = (Launcher(one, run_dir) for one in own for run_dir in _held(one.pid))
    return {name: one for one in found if (name := _run_in(one.run_dir))}


def _held(pid: int) -> Iterator[Path]:
    """Yield the run directories that a process holds against other launchers."""
    for link in _open_files(pid):
        try:
            lock = link.readlink()
            # Without the lock, the process only reads the file. The path may be another file here
            # if the process is in a container.
            if lock.name == LOCK_FILE and _is_locked(pid, link.name) and link.samefile(lock):
                yield lock.parent
        except OSError:  # closed meanwhile, or the file is gone
            continue


def _open_files(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it has ended, or we may not look into it
        return []


def _is_locked(pid: int, number: str) -> bool:
    """Return True if a process holds a write lock through this descriptor.

    Source: proc_pid_fdinfo(5): ``lock: 1: FLOCK  ADVISORY  WRITE 359 00:13:11691 0 EOF``
    """
    lines = Path(f"/proc/{pid}/fdinfo/{number}").read_text().splitlines()
    return any(line.startswith("lock:") and " WRITE " in line for line in lines)


def _run_in(run_dir: Path) -> str:
    try:
        return load(LaunchPlan, run_dir / PLAN_FILE).run_id
    except (OSError, CodecError):  # not written yet, or written by another version of fasttrain
        return ""


def end_run(run_id: str, grace_s: float) -> Ended:
    """End one of this user's runs on this machine; return what became of its processes.

    SIGTERM goes to its launcher, which passes it on once and doesn't restart the run. After the
    grace period the rest of the run is killed, and the launcher last, if it doesn't end by itself.

    Args:
        run_id: The run.
        grace_s: Seconds to save; the launcher's own limit may be shorter.
    """
    led = launchers().get(run_id)
    if led is None:
        return end(lambda: of_run(run_id), grace_s)
    launcher = led.process
    there = {pid: command_of(pid) for pid in (*of_run(run_id), launcher.pid)}
    send(launcher, signal.SIGTERM)
    # With grace 0, `end` sends no SIGTERM of its own: the launcher passes its one on.
    asked = end(lambda: of_run(run_id), 0, settle_s=grace_s)
    last = end(lambda: alive([launcher]), 0, settle_s=RECEIPT_S)
    rest = end(lambda: of_run(run_id), 0)  # a launcher that ignores SIGTERM has restarted the run
    left = last.left | rest.left
    ended = there | asked.ended | rest.ended
    return Ended(
        {pid: name for pid, name in ended.items() if pid not in left},
        asked.killed | last.killed | rest.killed,
        left,
    )
