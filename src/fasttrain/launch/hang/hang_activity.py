"""What shows that ranks go on, and what their processes do while none does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fasttrain.launch.hang.heartbeats import Pulse
from fasttrain.launch.process import procfs
from fasttrain.launch.process.procfs import Call


@dataclass(frozen=True, slots=True)
class Activity:
    """What processes and all that they have started had done at a moment.

    Attributes:
        quiet_s: The moment, in seconds without progress.
        done: Processor time in s and bytes read and written, by process.
    """

    quiet_s: float
    done: Mapping[int, tuple[float, int]]

    @classmethod
    def at(cls, quiet_s: float, pids: Iterable[int]) -> Activity:
        """Look at processes now."""
        family = {member for pid in pids for member in procfs.family(pid)}
        return cls(quiet_s, {pid: (procfs.cpu_s(pid), procfs.all_bytes(pid)) for pid in family})

    def cores_since(self, before: Activity) -> float:
        """Give how many cores were used on average."""
        used_s = sum(cpu_s for cpu_s, _ in self.done.values())
        used_before_s = sum(cpu_s for cpu_s, _ in before.done.values())
        return (used_s - used_before_s) / max(self.quiet_s - before.quiet_s, 1e-9)

    def active_since(self, before: Activity) -> frozenset[int]:
        """Give the processes that have computed, read or written anything, or are new."""
        return frozenset(pid for pid, done in self.done.items() if before.done.get(pid) != done)


@dataclass(frozen=True, slots=True)
class Doing:
    """What the worker of a rank does.

    Attributes:
        call: The system call that its main thread is in.
        children: What it may wait for: the child that its call names, or all of its children, and
            what descends from them.
        active: Processes that have done something since nothing goes on.
    """

    call: Call
    children: frozenset[int]
    active: frozenset[int]


def doing(pid: int, active: frozenset[int]) -> Doing:
    """Look at the main thread of a process and at what it may wait for."""
    call = procfs.call(pid)
    of_one = call.name == "wait" and call.argument > 0
    children = procfs.family(call.argument) if of_one else procfs.family(pid)[1:]
    return Doing(call, frozenset(children), active)


def signs(running: list[Pulse]) -> object:
    """Give what changes while anything goes on; the main thread writes the checkpoints."""
    return [(pulse, procfs.transferred_bytes(pulse.address.pid)) for pulse in running]


def have_begun(running: list[Pulse]) -> bool:
    """Whether every rank has made a step, by itself or by a process that it started."""
    steps: dict[int, int] = {}
    for pulse in running:
        rank = pulse.address.rank
        steps[rank] = max(steps.get(rank, 0), pulse.steps)
    return bool(steps) and all(steps.values())


def are_stopped(running: list[Pulse]) -> bool:
    """Whether a process of the ranks is stopped, by a signal or a debugger."""
    return any(procfs.is_stopped(pulse.address.pid) for pulse in running)
