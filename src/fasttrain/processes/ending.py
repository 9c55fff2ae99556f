"""End processes: SIGTERM first, and SIGKILL after a grace period."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from fasttrain.processes.table import Process, Table, command_of, send

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
