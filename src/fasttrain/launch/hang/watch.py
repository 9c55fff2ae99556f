"""Notices that no rank makes progress, and decides what is done about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from fasttrain.files import write_private
from fasttrain.launch.hang.heartbeats import HeartbeatRecord, HeartbeatRecords
from fasttrain.launch.hang.stacks import examine
from fasttrain.launch.hang.verdict import (
    Activity,
    are_stopped,
    doing,
    excuse,
    have_begun,
    on_network,
    signs,
    transfers,
    verdict,
    waits_for_ranks,
)
from fasttrain.launch.process import procfs
from fasttrain.model.codec import dumps
from fasttrain.model.hang import HANG_FILE, Hang, StuckRank
from fasttrain.model.plan import LaunchPlan
from fasttrain.model.secrets import without_secrets

# What the launchers of several nodes know of one hang: a run hangs only if all its nodes do.


class Nodes(Protocol):
    """Where the launcher of each node publishes what it finds.

    Attributes:
        see_each_other: Whether the launchers of all nodes meet here.
    """

    see_each_other: bool

    def say(self, found: Hang | None) -> None:
        """Publish that there is no progress here, or by None that there is some again."""

    def said(self) -> tuple[Hang, ...]:
        """Return the findings of all nodes, this one included; empty while one makes progress."""


class OneNode:
    """A launcher that knows of no other."""

    see_each_other = False

    def __init__(self) -> None:
        self._found: Hang | None = None

    def say(self, found: Hang | None) -> None:
        """Keep it."""
        self._found = found

    def said(self) -> tuple[Hang, ...]:
        """Return what this node has found."""
        return (self._found,) if self._found else ()


def together(hangs: Iterable[Hang]) -> Hang | None:
    """Return the hangs of several nodes as one; None where no rank is left that could hang."""
    stuck = [hang for hang in hangs if hang.ranks]
    if not stuck:
        return None
    ranks = sorted((rank for hang in hangs for rank in hang.ranks), key=lambda rank: rank.rank)
    ended = tuple(sorted(rank for hang in hangs for rank in hang.ended))
    return replace(
        stuck[0],
        quiet_s=min(hang.quiet_s for hang in stuck),
        limit_s=max(hang.limit_s for hang in stuck),
        verdict=verdict(tuple(ranks), ended),
        ranks=tuple(ranks),
        ended=ended,
    )


LOOK_FOR_PROCESSES_S = 1.0
MOST_OF_A_TICK_S = 1.0  # a longer one means that this process was stopped, as were the ranks
QUIET_S = 5.0  # without progress; from then on it matters whether something computes
SLOW_STEPS = 20
IDLE_S = 60.0
# Half of NCCL's own limit, after which its watchdog ends the process and the stacks are lost.
# Source: https://docs.pytorch.org/docs/2.9/distributed.html, init_process_group, timeout
BUSY_S = 300.0
TOLD_AGAIN = 2.0  # times as long as the longest wait that was reported
BUSY_SHARE = 0.5  # of one core: more than a thread uses that waits, less than one that computes


class HangWatch:
    """Checks the ranks of this node at each tick.

    Time without progress is counted in ticks and not by the clock, so that a run that was stopped
    by its terminal or its cluster, together with its launcher, has not hung.

    Attributes:
        hangs: What was found.
        problems: What could not be written of it, one sentence each.
        stopped: Whether it has had the run stopped.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        tell: Callable[[Hang], None],
        nodes: Nodes,
        secrets: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.hangs: list[Hang] = []
        self.problems: list[str] = []
        self._plan = plan
        self._watch = plan.guards.hang.value
        self._tell = tell
        self._nodes = nodes
        self._unseen = plan.processes.value.max_nodes > 1 and not nodes.see_each_other
        self._said = False
        self._clock = clock
        self._secrets = secrets  # which a line of source may hold
        self._heartbeats = HeartbeatRecords(Path(plan.run_dir))
        self._ranks: set[int] = set()
        self._seen: object = None
        self._told = False
        self.stopped = False
        self._quiet_s = self._running_s = 0.0
        self._before: Activity | None = None
        self._spared = self._patient = False
        self._spared_s = self._longest_s = 0.0
        self._ticked_s = clock()
        self._looked_s = -LOOK_FOR_PROCESSES_S

    def tick(self, *, held: bool = False) -> bool:
        """Check once; True if the run is to be stopped now.

        Args:
            held: Whether the run's output waits for its reader, for which the run may wait in turn.
        """
        now = self._clock()
        passed_s, self._ticked_s = min(now - self._ticked_s, MOST_OF_A_TICK_S), now
        if self.stopped or not self._watch.on:
            return False
        # Before anything else: once all nodes agree on the hang, they end their ranks, and this
        # node's ranks then wake up with errors, which is no progress.
        if self._said and not self._told and self._judge():
            return True
        heartbeats = self._look(now)
        if self._has_progressed(heartbeats):
            return False
        if not held and not self._is_on_disk(heartbeats):
            self._quiet_s += passed_s
            if any(
                procfs.runs(heartbeat.address.pid)
                for heartbeat in heartbeats
                if not heartbeat.ended
            ):
                self._running_s += passed_s
        # Reading /proc of all processes at every tick would cost more than everything else here.
        if self._before is None and self._quiet_s >= QUIET_S:
            self._before = self._activity(heartbeats)
        if self._said:
            return False
        self._say(heartbeats)
        return self._said and self._judge()

    def begin_again(self) -> None:
        """Watch another attempt."""
        self._heartbeats.close()
        self._ranks, self.stopped, self._longest_s = set(), False, 0.0
        self._start_over(None)

    def close(self) -> None:
        """Release the ranks' memory, after a last look at what the other nodes found."""
        if self._said and not self._told:
            self._judge()  # a node that agreed first has ended its ranks, and ours failed by that
        self._heartbeats.close()

    def _look(self, now: float) -> tuple[HeartbeatRecord, ...]:
        if now - self._looked_s >= LOOK_FOR_PROCESSES_S:
            self._looked_s = now
            self._heartbeats.find()
        heartbeats = self._heartbeats.read()
        self._ranks |= {heartbeat.address.rank for heartbeat in heartbeats}
        return heartbeats

    def _has_progressed(self, heartbeats: tuple[HeartbeatRecord, ...]) -> bool:
        """True if there was progress since the last tick, or it can't be told yet."""
        running = [heartbeat for heartbeat in heartbeats if not heartbeat.ended]
        seen = signs(running)
        begun = have_begun(running) if running else bool(self._ranks)
        if seen == self._seen and begun and not are_stopped(running):
            return False
        self._start_over(seen)
        return True

    def _start_over(self, seen: object) -> None:
        self._seen, self._told, self._spared, self._spared_s = seen, False, False, 0.0
        self._excuse()
        if self._said:
            self._said = False
            self._nodes.say(None)

    def _excuse(self) -> None:
        """Count the time from 0 again."""
        self._quiet_s = self._running_s = 0.0
        self._before, self._patient = None, False

    @property
    def _automatic(self) -> bool:
        return self._watch.timeout_s is None

    def _is_on_disk(self, heartbeats: tuple[HeartbeatRecord, ...]) -> bool:
        """True if a rank waits for a disk, which may take any time."""
        running = (heartbeat.address.pid for heartbeat in heartbeats if not heartbeat.ended)
        return self._automatic and any(map(procfs.waits_for_disk, running))

    def _activity(self, heartbeats: tuple[HeartbeatRecord, ...]) -> Activity:
        return Activity.at(self._quiet_s, (heartbeat.address.pid for heartbeat in heartbeats))

    def _limit_s(self, heartbeats: tuple[HeartbeatRecord, ...]) -> float:
        if self._watch.timeout_s is not None:
            return float(self._watch.timeout_s)
        if self._unseen:
            return BUSY_S  # ranks of another node may compute while those of this one wait
        steps_s = SLOW_STEPS * max(heartbeat.p95_s for heartbeat in heartbeats)
        if self._quiet_s < IDLE_S or self._quiet_s < steps_s or self._before is None:
            return max(IDLE_S, steps_s)
        busy = self._patient or self._computes(self._activity(heartbeats))
        return max(BUSY_S if busy else IDLE_S, steps_s)

    def _computes(self, now: Activity) -> bool:
        """True if something has computed, or a main thread would have on a less busy machine."""
        if self._running_s >= BUSY_SHARE * self._quiet_s:
            return True
        return self._before is not None and now.cores_since(self._before) >= BUSY_SHARE

    def _say(self, heartbeats: tuple[HeartbeatRecord, ...]) -> None:
        """Publish to the other nodes that there is no progress here, once the limit is reached."""
        running = [heartbeat for heartbeat in heartbeats if not heartbeat.ended]
        limit_s = self._limit_s(heartbeats) if running else 0.0
        if self._quiet_s < limit_s:
            return
        quiet_s, now = self._quiet_s, self._activity(heartbeats)
        before = self._before or now
        active, moved = now.active_since(before), now.moved_since(before)
        # Before the stacks are asked for: writing them is activity, too.
        seen = {
            heartbeat.address.pid: doing(heartbeat.address.pid, active) for heartbeat in running
        }
        ranks = examine(running, Path(self._plan.run_dir))
        self._seen = signs(running)
        # Processes without a step of their own, such as a pool's, are no ranks that could wait.
        stepping = sum(heartbeat.steps > 0 for heartbeat in running)
        alone = stepping <= 1 and self._plan.processes.value.max_nodes == 1
        if excuse(ranks, seen, automatic=self._automatic):
            self._excuse()  # checked again after the same time
            return
        used = any(transfers(rank, moved) or on_network(rank, seen, alone=alone) for rank in ranks)
        if self._automatic and used and self._may_wait(ranks):
            return
        # Nobody waits for a lone process, and no one can tell a wait without end from a long one.
        spared = self._automatic and self._watch.action == "stop" and (alone or used)
        action, run_id = "spare" if spared else self._watch.action, self._plan.run_id
        ended = tuple(sorted(self._ranks - {rank.rank for rank in ranks}))
        hang = Hang(run_id, quiet_s, limit_s, action, (), ranks, ended)
        self._found(without_secrets(Hang, hang, self._secrets))

    def _may_wait(self, ranks: tuple[StuckRank, ...]) -> bool:
        """True if ranks of which one transfers something may do so for now."""
        several_nodes = self._plan.processes.value.max_nodes > 1
        if several_nodes or any(waits_for_ranks(rank.processes[0]) for rank in ranks):
            self._patient = self._quiet_s < BUSY_S
            return self._patient
        self._excuse()
        return True

    def _found(self, hang: Hang) -> None:
        if hang.action != "spare":
            self._nodes.say(hang)
            self._said = True
            return
        self._excuse()  # it is stopped if it hangs again later
        self._spared_s += hang.quiet_s
        # A script may wait again and again, as for the next games of self-play: only a wait that is
        # much longer than those before says more.
        told = together([hang])
        if not self._spared and told and self._spared_s >= TOLD_AGAIN * self._longest_s:
            self._spared = True
            self._tell_of(replace(told, quiet_s=self._spared_s))
        if self._spared:
            self._longest_s = self._spared_s

    def _judge(self) -> bool:
        """True if the run is to be stopped, once all nodes have found no progress."""
        hang = together(self._nodes.said())
        if hang is None:
            return False
        self._told = True
        self._tell_of(hang)
        self.stopped = hang.action == "stop"
        return self.stopped

    def _tell_of(self, hang: Hang) -> None:
        self.hangs.append(hang)
        self._keep(hang)
        self._tell(hang)

    def _keep(self, hang: Hang) -> None:
        try:
            write_private(Path(self._plan.run_dir, HANG_FILE), dumps(hang))
        except OSError as error:  # a full disk is no reason to let the run hang on
            self.problems.append(f"{HANG_FILE} can't be written: {error.strerror}")
