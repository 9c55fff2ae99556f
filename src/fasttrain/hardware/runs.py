"""This user's runs on this machine and their processes, with or without a living launcher."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePath

import psutil

from fasttrain.model.job import LocalRun, RunState
from fasttrain.model.machine import DeviceProcess
from fasttrain.model.outcome import RECEIPT_FILE
from fasttrain.model.places import (
    AGENT_PROGRAM,
    LAUNCHER_PROGRAM,
    RUN_MARK,
    SPAWN_MODULE,
    TASK_MODULE,
    WORKER_PROGRAM,
)
from fasttrain.model.plan import PLAN_FILE
from fasttrain.processes.launchers import Launcher, launchers
from fasttrain.processes.table import mark_of, of_run

# The command that multiprocessing's spawn starts a worker's child with.
_SPAWNED = re.compile(re.escape(SPAWN_MODULE) + r".*prepare\('([^']+)', ")
_LAUNCHERS = ("fasttrain", TASK_MODULE)


@dataclass(frozen=True, slots=True)
class RunProcess:
    """A process of a run.

    Attributes:
        run: The run directory; the run's name if the directory isn't known.
        orphan: True if no ancestor is a launcher of fasttrain.
        left: True for one that is no worker, of a run that has ended: its script has left it
            running on purpose, such as TensorBoard.
    """

    run: str
    orphan: bool
    left: bool = False


def find_run_processes(run_root: Path) -> dict[int, RunProcess]:
    """Return this user's processes of runs, by pid.

    A process belongs to a run if its command line names the run's plan, or if it carries the run's
    mark in its environment: a command under ``--no-python``, and whatever a script has started.

    Args:
        run_root: The folder in which run directories are looked up by name.
    """
    # This process and its ancestors may be part of a run themselves, but are no leftovers.
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = {}
    for process in _own_processes():
        with suppress(psutil.Error):  # it has ended, or can't be read
            run = run_of(process.cmdline(), {RUN_MARK: mark_of(process.pid)}, run_root)
            if run and process.pid not in spared:
                orphan = not _has_launcher(process)
                left = orphan and _was_left(process, run, run_root)
                found[process.pid] = RunProcess(run, orphan, left)
    return found


def _was_left(process: psutil.Process, run: str, run_root: Path) -> bool:
    if run_of(process.cmdline(), {}, run_root):  # a worker
        return False
    folder = _directory(PurePath(run).name, [run], [process.pid], run_root)
    return bool(folder) and Path(folder, RECEIPT_FILE).is_file()


def run_of(argv: Sequence[str], environ: Mapping[str, str], run_root: Path) -> str:
    """Return the run directory, or at least the name, of a process's run; empty if none."""
    for word, following in pairwise(argv):
        if word.endswith(WORKER_PROGRAM) and PurePath(following).name == PLAN_FILE:
            return str(PurePath(following).parent)
        if word == "-c" and (spawned := _SPAWNED.search(following)):
            return str(PurePath(spawned[1]).parent)
    name = environ.get(RUN_MARK, "")
    return str(run_root / name) if name and (run_root / name).is_dir() else name


def is_launcher(argv: Sequence[str]) -> bool:
    """True if a command line is that of a launcher or an agent, also on a SLURM node."""
    program = _program(argv)
    return PurePath(program).name in _LAUNCHERS or program.endswith(
        (AGENT_PROGRAM, LAUNCHER_PROGRAM)
    )


def as_device_process(
    pid: int, memory_bytes: int, runs: Mapping[int, RunProcess], command: str = ""
) -> DeviceProcess:
    """Return a process that a driver lists, completed by its command and run.

    Args:
        pid: The process as the driver numbers it. Processes outside of this container have no
            number here, and get 0.
        memory_bytes: Device memory that it holds.
        runs: Processes of fasttrain's runs, by pid.
        command: The driver's name for it, used if the process can't be read.
    """
    try:
        command = _command(psutil.Process(pid)) or command
    except (psutil.AccessDenied, psutil.ZombieProcess):
        pass  # it exists, but only the driver knows its name
    except psutil.NoSuchProcess:
        return DeviceProcess(0, memory_bytes, command)
    run = runs.get(pid, RunProcess("", orphan=False))
    dead = run.orphan and not run.left
    return DeviceProcess(pid, memory_bytes, command, run.run, dead)


def orphans(runs: Mapping[int, RunProcess]) -> tuple[DeviceProcess, ...]:
    """Return the live processes of runs whose launcher is dead, but for those left on purpose."""
    found = (
        as_device_process(pid, 0, runs) for pid, run in runs.items() if run.orphan and not run.left
    )
    return tuple(process for process in found if process.pid)


def _own_processes() -> Iterator[psutil.Process]:
    user = os.getuid()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == user:
                yield process


def _has_launcher(process: psutil.Process) -> bool:
    for one in (process, *process.parents()):
        with suppress(psutil.Error):  # an ancestor that has just ended is no launcher
            if is_launcher(one.cmdline()):
                return True
    return False


def _program(argv: Sequence[str]) -> str:
    """Return the script or module that a Python command line runs; else the command itself."""
    words = iter(argv)
    command = next(words, "")
    if "python" not in PurePath(command).name:
        return command
    for word in words:
        if word == "-m":
            return next(words, "")
        if word in ("-X", "-W"):
            next(words, "")
        elif not word.startswith("-"):
            return word
    return command


def _command(process: psutil.Process) -> str:
    # Not process.name(): torch names the main thread of its processes pt_main_thread. A title that
    # a program sets is one argument that may hold secrets, so only its first word is kept.
    words = " ".join(process.cmdline()[:1]).split()
    return PurePath(words[0]).name if words else process.name()


def find_runs(run_root: Path, held_bytes: Mapping[int, int], receipt: str) -> tuple[LocalRun, ...]:
    """Return runs, the oldest first, found by the marks of processes and by launchers.

    Args:
        run_root: The folder of run directories.
        held_bytes: Device memory by pid.
        receipt: Name of the file that a run writes at its end.
    """
    known = find_run_processes(run_root)
    live = launchers()
    names = live.keys() | {mark for pid in known if (mark := mark_of(pid))}
    runs = [_run(name, known, held_bytes, run_root, receipt, live.get(name)) for name in names]
    live_runs = (run for run in runs if run.processes or run.launcher)
    return tuple(sorted(live_runs, key=lambda run: run.started_s))


def _run(
    name: str,
    known: Mapping[int, RunProcess],
    held_bytes: Mapping[int, int],
    run_root: Path,
    receipt: str,
    launcher: Launcher | None,
) -> LocalRun:
    pids = sorted(of_run(name))
    processes = (as_device_process(pid, held_bytes.get(pid, 0), known) for pid in pids)
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
        processes=tuple(process for process in processes if process.pid),
        run_dir=run_dir,
        launcher=leader,
    )


def _directory(name: str, named: list[str], pids: list[int], run_root: Path) -> str:
    """Return the run directory: the first full path in `named`, or the default of a process."""
    for run in named:
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
    return float("inf")  # it has ended, and must not decide the minimum
