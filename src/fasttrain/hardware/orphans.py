"""Processes of fasttrain's runs on this machine, and those whose launcher is dead."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePath

import psutil

from fasttrain.model.examination import DeviceProcess
from fasttrain.model.places import (
    AGENT_PROGRAM,
    LAUNCHER_PROGRAM,
    RUN_MARK,
    SPAWN_MODULE,
    TASK_MODULE,
    WORKER_PROGRAM,
)
from fasttrain.model.plan import PLAN_FILE
from fasttrain.processes.table import mark_of

# The line that a spawned child of a worker begins with.
_SPAWNED = re.compile(re.escape(SPAWN_MODULE) + r".*prepare\('([^']+)', ")
_LAUNCHERS = ("fasttrain", TASK_MODULE)


@dataclass(frozen=True, slots=True)
class RunProcess:
    """A process of a run: its run directory, and whether nothing of fasttrain is above it.

    Where the directory isn't known, `run` is the run's name alone.
    """

    run: str
    orphan: bool


def find_run_processes(run_root: Path) -> dict[int, RunProcess]:
    """Give the processes of runs, by pid, that belong to this user; others are closed to us.

    A command under ``--no-python`` has no plan on its command line, so the mark in the environment
    counts too, and with it whatever the script has started.

    Args:
        run_root: Where run directories are looked for by name.
    """
    # This process and those above it may be inside of a run themselves, but are no leftovers.
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = {}
    for process in _own_processes():
        with suppress(psutil.Error):  # it ended meanwhile, or is closed to us after all
            run = run_of(process.cmdline(), {RUN_MARK: mark_of(process.pid)}, run_root)
            if run and process.pid not in spared:
                found[process.pid] = RunProcess(run, not _is_led(process))
    return found


def run_of(argv: Sequence[str], environ: Mapping[str, str], run_root: Path) -> str:
    """Give the run directory, or at least the name, of a process's run; empty if it is of none."""
    for word, following in pairwise(argv):
        if word.endswith(WORKER_PROGRAM) and PurePath(following).name == PLAN_FILE:
            return str(PurePath(following).parent)
        if word == "-c" and (spawned := _SPAWNED.search(following)):
            return str(PurePath(spawned[1]).parent)
    name = environ.get(RUN_MARK, "")
    return str(run_root / name) if name and (run_root / name).is_dir() else name


def is_launcher(argv: Sequence[str]) -> bool:
    """Whether a command line is one of fasttrain's own, on a SLURM node too."""
    program = _program(argv)
    return PurePath(program).name in _LAUNCHERS or program.endswith(
        (AGENT_PROGRAM, LAUNCHER_PROGRAM)
    )


def as_device_process(
    pid: int, memory_bytes: int, runs: Mapping[int, RunProcess], command: str = ""
) -> DeviceProcess:
    """Give a driver's word on a process with what is known of it here.

    Drivers may count processes outside of the container that this one runs in; those have no
    number here.
    """
    try:
        command = _command(psutil.Process(pid)) or command
    except (psutil.AccessDenied, psutil.ZombieProcess):
        pass  # it is there, and the driver's word for it has to do
    except psutil.NoSuchProcess:
        return DeviceProcess(0, memory_bytes, command)
    run = runs.get(pid, RunProcess("", orphan=False))
    return DeviceProcess(pid, memory_bytes, command, run.run, run.orphan)


def orphans(runs: Mapping[int, RunProcess]) -> tuple[DeviceProcess, ...]:
    """Give those processes of runs whose launcher is dead, and that haven't ended since."""
    told = (as_device_process(pid, 0, runs) for pid, run in runs.items() if run.orphan)
    return tuple(process for process in told if process.pid)


def _own_processes() -> Iterator[psutil.Process]:
    user = os.getuid()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == user:
                yield process


def _is_led(process: psutil.Process) -> bool:
    for one in (process, *process.parents()):
        with suppress(psutil.Error):  # a launcher that just ended leads nobody
            if is_launcher(one.cmdline()):
                return True
    return False


def _program(argv: Sequence[str]) -> str:
    """Give the script or module that a command line of Python runs; else the command itself."""
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
    # Not process.name(): torch calls the main thread of its processes pt_main_thread. A title that
    # a program gave itself comes as one word and may hold arguments, so it is cut at the first.
    words = " ".join(process.cmdline()[:1]).split()
    return PurePath(words[0]).name if words else process.name()
