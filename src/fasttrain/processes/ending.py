"""Ends processes: they are asked first, and killed when their time is over."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from fasttrain.processes.table import Process, Table, command_of, send

TICK_S = 0.05
SHOWN = 6  # processes that a message names
DEATH_S = 5.0  # for what was killed to be gone; a process that waits for a device may take longer


@dataclass(slots=True)
class Ended:
    """What became of processes, each with the name of its program by its number.

    Attributes:
        ended: Those that ended when they were asked or killed.
        killed: Those of them that had to be killed.
        left: Those that are still there: they wait in the kernel, or belong to somebody else.
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
    """End all processes that ``find`` gives, till it gives none.

    SIGTERM goes to the uppermost ones, who may have children to save from, and to others as they
    become uppermost. What starts new processes meanwhile doesn't get away.

    Args:
        find: Looks for what is still there.
        grace_s: Seconds between being asked and being killed; 0 kills at once.
        settle_s: Seconds before they are asked, for those that are about to end by themselves.
        pause: Waits so many seconds at most, and says whether to kill what is left now.
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
    told = {one.pid: result.ended.get(one.pid) or command_of(one.pid) for one in processes}
    result.ended |= told
    for one in processes:
        send(one, signum)
    return told


def uppermost(processes: Table) -> list[Process]:
    """Return the processes whose parents are not among them."""
    return [one for one in processes.values() if one.parent not in processes]


def named(processes: dict[int, str]) -> str:
    """Return processes as a list for users, such as ``python (pid 12), sleep (pid 14)``."""
    shown = [f"{name or 'process'} (pid {pid})" for pid, name in sorted(processes.items())]
    more = [f"{len(shown) - SHOWN} more"] if len(shown) > SHOWN else []
    return ", ".join(shown[:SHOWN] + more)


def _sleep(limit_s: float) -> bool:
    time.sleep(limit_s)
    return False
