"""Starts the processes of one node and stays with them to their end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from fasttrain.launch.crash import Scene, investigate
from fasttrain.launch.display import Display
from fasttrain.launch.follow import EventTail, RankTails
from fasttrain.launch.hang_watch import HangWatch
from fasttrain.launch.relay import Relay
from fasttrain.launch.stop import Stop
from fasttrain.launch.supervise import supervise
from fasttrain.spec.crash import Crash, Surroundings
from fasttrain.spec.errors import ExitCode
from fasttrain.spec.hang import HANG_FILE, Hang
from fasttrain.spec.plan import EnvVar, LaunchPlan


class Watch(Protocol):
    """Follows a run from the outside while it is supervised."""

    def heard(self, signum: int) -> None:
        """Take note of a signal to the launcher."""

    def tick(self) -> None:
        """Do what is due, a few times a second."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one node runs.

    Attributes:
        plan: The plan; its run directory is there already.
        masked: The same without secrets.
        program: Path of the program.
        environ: The environment as the user has it.
        environment: The environment of the program.
        rank: Rank of the only worker, where there is no agent.
    """

    plan: LaunchPlan
    masked: LaunchPlan
    program: str
    environ: Mapping[str, str]
    environment: Mapping[str, str]
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Around:
    """Who follows the run.

    Attributes:
        display: Shows the output of the script and the progress.
        look_around: Looks at the machine's memory, before the run and behind it.
        on_hang: Called when no rank goes on any more, before the run is stopped.
        watches: Hear of signals, and are asked a few times a second.
    """

    display: Display
    look_around: Callable[[], Surroundings] = Surroundings
    on_hang: Callable[[Hang], None] = lambda _: None
    watches: Sequence[Watch] = field(default=())


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of this node's processes.

    Attributes:
        exit_code: Of the script, or 128 + signal.
        wall_s: Seconds from start to end.
        warnings: What went wrong beside it, one sentence each.
        crash: Why it failed; None where nothing did.
    """

    exit_code: int
    wall_s: float
    warnings: tuple[str, ...] = ()
    crash: Crash | None = None


def attend(part: Part, around: Around) -> Ended:
    """Start this node's processes and stay with them to their end.

    Raises:
        FasttrainError: The program can't be started.
    """
    plan, run_dir = part.plan, Path(part.plan.run_dir)
    relay = Relay(run_dir / log_name(plan), around.display)
    hang = HangWatch(part.masked, around.on_hang)
    follower = _Follower(plan, around, hang)
    stop = Stop(plan.shutdown_timeout_s, around.display.tell, follower.heard)
    before, started_s = around.look_around(), time.monotonic()
    try:
        end = supervise(part.program, plan.argv, part.environment, relay, follower.tick, stop)
    finally:
        relay.finish()
        follower.close()
    wall_s = time.monotonic() - started_s
    seen = (*end.warnings, *_seen(hang, relay, run_dir))
    if hang.stopped:
        return Ended(ExitCode.HUNG, wall_s, seen)
    after, shown = around.look_around(), _shown_ranks(plan)
    crash, unread = investigate(
        Scene(plan, part.masked, part.environ, end.exit_code, before, after, shown, part.rank)
    )
    # torchrun tells the first to fail by whole seconds; here, the ranks' own clocks do.
    return Ended(crash.exit_code if crash else end.exit_code, wall_s, (*seen, *unread), crash)


class _Follower:
    """Shows what the ranks write to their files, and has the watches do theirs."""

    def __init__(self, plan: LaunchPlan, around: Around, hang: HangWatch) -> None:
        run_dir = Path(plan.run_dir)
        self._hang = hang
        self._display, self._watches = around.display, around.watches
        self._events = EventTail(run_dir / f"events-{first_rank(plan)}.jsonl")
        self._others = RankTails(run_dir, partial(_follows, plan))

    def heard(self, signum: int) -> None:
        for watch in self._watches:
            watch.heard(signum)

    def tick(self) -> None:
        self._show(self._others.lines())
        if event := self._events.latest():
            self._display.progress(event)
        for watch in self._watches:
            watch.tick()
        if self._hang.tick():
            os.kill(os.getpid(), signal.SIGTERM)  # as whoever would stop the run from outside

    def close(self) -> None:
        self._hang.close()
        self._show(self._others.lines(rest=True))
        self._display.close()

    def _show(self, lines: Iterator[bytes]) -> None:
        for line in lines:
            self._display.write(1, line)


def _seen(hang: HangWatch, relay: Relay, run_dir: Path) -> Iterator[str]:
    """Tell what the launcher saw go wrong."""
    for found in hang.hangs:
        yield f"no rank went on for {found.quiet_s:.0f} s: see {HANG_FILE}"
    if relay.log_error:
        yield f"the log in {run_dir} is not whole: {relay.log_error}"


def compose(environ: Mapping[str, str], changes: tuple[EnvVar, ...]) -> dict[str, str]:
    """Give the environment of the processes."""
    result = dict(environ)
    for change in changes:
        if change.value is None:
            result.pop(change.name, None)
        else:
            result[change.name] = change.value
    return result


def log_name(plan: LaunchPlan) -> str:
    """Give the name of the log of what this node's first process prints."""
    return "rank-0.log" if _relays_rank_0(plan) else "agent.log"


def first_rank(plan: LaunchPlan) -> int:
    """Give the lowest rank of this node."""
    processes = plan.processes.value
    return processes.node_rank * processes.nproc_per_node


def _shown_ranks(plan: LaunchPlan) -> frozenset[int]:
    """Give the ranks of this node that are shown; in an elastic run, of all that may be here."""
    processes, first = plan.processes.value, first_rank(plan)
    count = processes.world_size if processes.rdzv_endpoint else processes.nproc_per_node
    return frozenset(rank for rank in range(first, first + count) if _shows(plan, rank))


def _shows(plan: LaunchPlan, rank: int) -> bool:
    return plan.show_ranks is None or rank in plan.show_ranks


def _relays_rank_0(plan: LaunchPlan) -> bool:
    """Whether rank 0 writes to the relayed stream; in an elastic run it may be on any node."""
    elastic = plan.processes.value.rdzv_endpoint
    return not elastic and first_rank(plan) == 0 and _shows(plan, 0)


def _follows(plan: LaunchPlan, rank: int) -> bool:
    return _shows(plan, rank) and not (rank == 0 and _relays_rank_0(plan))
