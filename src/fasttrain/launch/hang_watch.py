"""Notices that no rank of this node goes on, and what is to be done about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from fasttrain.launch import procfs
from fasttrain.launch.hang_scene import examine
from fasttrain.launch.hang_words import excuse, verdict
from fasttrain.launch.pulses import Pulse, Pulses
from fasttrain.launch.run_dir import write_private
from fasttrain.spec.codec import dumps
from fasttrain.spec.hang import HANG_FILE, Hang
from fasttrain.spec.plan import LaunchPlan

LOOK_FOR_PROCESSES_S = 1.0
MOST_OF_A_TICK_S = 1.0  # a longer one means that this process was stopped, and the others too
QUIET_S = 5.0  # from which on it matters whether something computes
SLOW_STEPS = 20
IDLE_S = 60.0
# Half of NCCL's own limit, behind which its watchdog ends the process and the stacks are lost.
# Source: https://docs.pytorch.org/docs/2.9/distributed.html, init_process_group, timeout
BUSY_S = 300.0
BUSY_SHARE = 0.5  # of one core: what a thread that computes takes, and one that waits does not


class HangWatch:
    """Looks at the ranks at each tick.

    A hang is counted in ticks and not by the clock, so that a run that was stopped by its terminal
    or its cluster, together with its launcher, has not hung.

    Attributes:
        hangs: What was found.
        stopped: Whether it has asked for the end of the run.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        tell: Callable[[Hang], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.hangs: list[Hang] = []
        self._plan = plan
        self._watch = plan.guards.hang.value
        self._tell = tell
        self._clock = clock
        self._pulses = Pulses(Path(plan.run_dir))
        self._ranks: set[int] = set()
        self._seen: object = None
        self._told = False
        self.stopped = False
        self._quiet_s = 0.0
        self._before: tuple[float, float] | None = None  # quiet time, processor time
        self._ticked_s = clock()
        self._looked_s = -LOOK_FOR_PROCESSES_S

    def tick(self) -> bool:
        """Look once, and say whether the run is to be stopped now."""
        now = self._clock()
        passed_s, self._ticked_s = min(now - self._ticked_s, MOST_OF_A_TICK_S), now
        if self.stopped or not self._watch.on:
            return False
        pulses = self._look(now)
        if self._goes_on(pulses):
            return False
        self._quiet_s += passed_s
        # To walk through all threads of all processes at every step would cost more than the rest.
        if self._before is None and self._quiet_s >= QUIET_S:
            self._before = self._quiet_s, _cpu_s(pulses)
        if self._told or self._quiet_s < self._limit_s(pulses):
            return False
        return self._judge(pulses)

    def close(self) -> None:
        """Let go of what the ranks share."""
        self._pulses.close()

    def _look(self, now: float) -> tuple[Pulse, ...]:
        if now - self._looked_s >= LOOK_FOR_PROCESSES_S:
            self._looked_s = now
            self._pulses.find()
        pulses = self._pulses.read()
        self._ranks |= {pulse.address.rank for pulse in pulses}
        return pulses

    def _goes_on(self, pulses: tuple[Pulse, ...]) -> bool:
        """Whether anything has changed since the last look, or nothing can be said."""
        running = [pulse for pulse in pulses if not pulse.ended]
        seen = _signs(running)
        if seen == self._seen and _have_begun(running) and not _are_stopped(running):
            return False
        self._seen, self._told, self._quiet_s, self._before = seen, False, 0.0, None
        return True

    def _limit_s(self, pulses: tuple[Pulse, ...]) -> float:
        if self._watch.timeout_s is not None:
            return float(self._watch.timeout_s)
        steps_s = SLOW_STEPS * max(pulse.p95_s for pulse in pulses)
        if self._quiet_s < IDLE_S or self._quiet_s < steps_s or self._before is None:
            return max(IDLE_S, steps_s)
        quiet_s, cpu_s = self._before
        share = (_cpu_s(pulses) - cpu_s) / (self._quiet_s - quiet_s)
        return max(BUSY_S if share >= BUSY_SHARE else IDLE_S, steps_s)

    def _judge(self, pulses: tuple[Pulse, ...]) -> bool:
        running = [pulse for pulse in pulses if not pulse.ended]
        limit_s, quiet_s = self._limit_s(pulses), self._quiet_s
        ranks = examine(running, Path(self._plan.run_dir))
        self._seen = _signs(running)  # an answer is written too
        if excuse(ranks):
            self._quiet_s, self._before = 0.0, None  # asked again when as much time has passed
            return False
        ended = tuple(sorted(self._ranks - {rank.rank for rank in ranks}))
        told = verdict(ranks, ended)
        action = self._watch.action
        hang = Hang(self._plan.run_id, quiet_s, limit_s, action, told, ranks, ended)
        self._told = True
        self.hangs.append(hang)
        write_private(Path(self._plan.run_dir, HANG_FILE), dumps(hang))
        self._tell(hang)
        self.stopped = action == "stop"
        return self.stopped


def _signs(running: list[Pulse]) -> object:
    """Give what changes while anything goes on; the main thread writes the checkpoints."""
    return [(pulse, procfs.transferred_bytes(pulse.address.pid)) for pulse in running]


def _have_begun(running: list[Pulse]) -> bool:
    """Whether every rank has made a step, by itself or by a process that it started."""
    steps: dict[int, int] = {}
    for pulse in running:
        rank = pulse.address.rank
        steps[rank] = max(steps.get(rank, 0), pulse.steps)
    return bool(steps) and all(steps.values())


def _are_stopped(running: list[Pulse]) -> bool:
    return any(procfs.is_stopped(pulse.address.pid) for pulse in running)


def _cpu_s(pulses: tuple[Pulse, ...] | list[Pulse]) -> float:
    pids = {pid for pulse in pulses for pid in procfs.family(pulse.address.pid)}
    return sum(map(procfs.cpu_s, pids))
