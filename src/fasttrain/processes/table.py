"""The processes of this machine, read from /proc, and those that belong to a run."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
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


# End processes: SIGTERM first, and SIGKILL after a grace period.


TICK_S = 0.05
SHOWN = 6  # most processes that a message names
DEATH_S = 5.0  # from SIGKILL until a process is gone; one that waits for a device may take longer


@dataclass(slots=True)
class Ended:
    """The result of ending processes: process ID to the name of the program.

    Attributes:
        ended: Processes that ended after SIGTERM or SIGKILL.
        killed: Those of them that needed SIGKILL.
        left: Processes that still exist: they wait in the kernel, or are another user's.
    """

    ended: dict[int, str] = field(default_factory=dict)
    killed: dict[int, str] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)


def end(
    find: Callable[[], Table],
    grace_s: float,
    *,
    settle_s: float = 0.0,
    pause: Callable[[float], bool] | None = None,
) -> Ended:
    """End all processes that ``find`` returns, until it returns none.

    SIGTERM goes to the topmost processes, which may need their children in order to save, and to
    others once they are topmost. Since ``find`` is called again and again, processes that are
    started meanwhile are ended as well.

    Args:
        find: Returns the processes that still exist.
        grace_s: Seconds between SIGTERM and SIGKILL; 0 kills at once.
        settle_s: Seconds before SIGTERM, for processes that are about to end by themselves.
        pause: Sleeps for at most so many seconds, and returns True to kill what is left now.
    """
    result, asked = Ended(), set[Process]()
    kill_s = time.monotonic() + settle_s + grace_s
    while processes := find():
        now_s = time.monotonic()
        if now_s >= kill_s + DEATH_S:
            result.left = {pid: result.ended.pop(pid, command_of(pid)) for pid in processes}
            break
        if now_s >= kill_s:
            result.killed |= _signal(processes.values(), signal.SIGKILL, result)
        elif now_s >= kill_s - grace_s:
            new = [one for one in uppermost(processes) if one not in asked]
            _signal(new, signal.SIGTERM, result)
            asked.update(new)
        if (pause or _sleep)(TICK_S):
            kill_s = min(kill_s, now_s)
    return result


def _signal(
    processes: Collection[Process], signum: signal.Signals, result: Ended
) -> dict[int, str]:
    names = {one.pid: result.ended.get(one.pid) or command_of(one.pid) for one in processes}
    result.ended |= names
    for one in processes:
        send(one, signum)
    return names


def uppermost(processes: Table) -> list[Process]:
    """Return the processes whose parents are not among them."""
    return [one for one in processes.values() if one.parent not in processes]


def named(processes: dict[int, str]) -> str:
    """Return a list of processes for users, such as ``python (pid 12), sleep (pid 14)``."""
    shown = [f"{name or 'process'} (pid {pid})" for pid, name in sorted(processes.items())]
    more = [f"{len(shown) - SHOWN} more"] if len(shown) > SHOWN else []
    return ", ".join(shown[:SHOWN] + more)


def _sleep(limit_s: float) -> bool:
    time.sleep(limit_s)
    return False
