"""The processes of this machine, read from /proc, and those that belong to a run."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fasttrain.model.places import RUN_MARK

_DEAD = ("Z", "X")


class Process(NamedTuple):
    """One process, identified by process ID and start time, since the kernel reuses IDs.

    Attributes:
        pid: Its process ID.
        parent: Process ID of its parent.
        started_ticks: When it started, in clock ticks since the machine booted.
    """

    pid: int
    parent: int
    started_ticks: int


Table = dict[int, Process]


def table() -> Table:
    """Return the live processes by process ID, without zombies; none if there is no /proc."""
    with suppress(FileNotFoundError):
        names = [path.name for path in Path("/proc").iterdir()]
        found = (look_up(int(name)) for name in names if name.isdecimal())
        return {process.pid: process for process in found if process}
    return {}


def look_up(pid: int) -> Process | None:
    """Return the process with this ID; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:  # ProcessLookupError if it ended during the read
        return None
    # The name in parentheses may itself contain spaces and parentheses.
    # Source: proc(5), /proc/pid/stat
    state, parent, *rest = stat[stat.rindex(")") + 1 :].split()
    return None if state in _DEAD else Process(pid, int(parent), int(rest[17]))


def name_of(process: Process) -> str:
    """Return a word that identifies this process uniquely."""
    return f"{process.pid}.{process.started_ticks}"


def alive(processes: Iterable[Process]) -> Table:
    """Return those processes that haven't ended."""
    found = ((process, look_up(process.pid)) for process in processes)
    return {
        now.pid: now for process, now in found if now and now.started_ticks == process.started_ticks
    }


def mark_of(pid: int) -> str:
    """Return the run's name in a process's environment; empty if none, or if it isn't readable."""
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return ""
    start = f"{RUN_MARK}=".encode()
    entries = (entry for entry in content.split(b"\0") if entry.startswith(start))
    return os.fsdecode(next(entries, b"").removeprefix(start))


def is_own(pid: int) -> bool:
    """Return True if a process is this user's; root could read those of others, too."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid == os.geteuid()
    except OSError:
        return False


def marks(processes: Iterable[int]) -> dict[int, str]:
    """Return process ID to run name, for this user's processes that belong to a run."""
    found = {pid: mark_of(pid) for pid in processes if is_own(pid)}
    return {pid: mark for pid, mark in found.items() if mark}


def descendants(roots: Iterable[int], processes: Mapping[int, Process]) -> Table:
    """Return all descendants of some processes, without these processes."""
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
    found: Table = {}
    left = [child for root in roots for child in children.get(root, ())]
    while left:
        process = left.pop()
        if process.pid not in found:
            found[process.pid] = process
            left += children.get(process.pid, ())
    return found


def ancestors(pid: int, processes: Mapping[int, Process]) -> set[int]:
    """Return a process ID and those of all its ancestors."""
    found: set[int] = set()
    while pid in processes and pid not in found:
        found.add(pid)
        pid = processes[pid].parent
    return found


def of_run(run_id: str) -> Table:
    """Return this user's processes with the mark of a run, and all their descendants.

    Descendants may lack the mark: a program can clear its environment, or overwrite it with its
    title. This process and its ancestors are left out.
    """
    processes = table()
    roots = {pid for pid, mark in marks(processes).items() if mark == run_id}
    found = {pid: processes[pid] for pid in roots} | descendants(roots, processes)
    return {pid: found[pid] for pid in found.keys() - ancestors(os.getpid(), processes)}


def command_of(pid: int) -> str:
    """Return the name of a process's program, such as ``python``; empty if it has ended."""
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        # A title that a program set itself is one argument with spaces.
        words = os.fsdecode(argv[0]).split()
        # A process that is about to end has freed its memory, but kept its short name.
        return Path(words[0]).name if words else Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def send(process: Process, signum: signal.Signals) -> None:
    """Send a signal to a process, and never to another one that has got its ID since.

    No-op if the process has ended, or if we may not signal it.
    """
    with suppress(ProcessLookupError, PermissionError):
        try:
            descriptor = os.pidfd_open(process.pid)
        except OSError:  # a kernel before 5.3, or the process has ended
            if look_up(process.pid) == process:
                os.kill(process.pid, signum)
            return
        try:
            # Check after opening: from then on the descriptor means one process, whatever happens
            # to the ID.
            found = look_up(process.pid)
            if found and found.started_ticks == process.started_ticks:
                signal.pidfd_send_signal(descriptor, signum)
        finally:
            os.close(descriptor)


def peak_of_children() -> int:
    """Return the highest memory use of any process that this one has waited for, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
