"""Runs a plan from its directory to its receipt."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from fasttrain.launch.display import Display
from fasttrain.launch.follow import EventTail, RankTails
from fasttrain.launch.preflight import check_port, find_program
from fasttrain.launch.receipts import gather
from fasttrain.launch.relay import Relay
from fasttrain.launch.run_dir import create
from fasttrain.launch.stop import Stop
from fasttrain.launch.supervise import supervise
from fasttrain.spec.outcome import Receipt
from fasttrain.spec.plan import EnvVar, LaunchPlan


class Watch(Protocol):
    """Follows one run from the outside while it is supervised."""

    def heard(self, signum: int) -> None:
        """Take note of a signal that was passed on to the run."""

    def tick(self) -> None:
        """Do what is due, a few times a second."""


class NoWatch:
    """Follows nothing."""

    def heard(self, signum: int) -> None:
        """Take no note."""

    def tick(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of this node's processes.

    Attributes:
        exit_code: Of the script, or 128 + signal.
        wall_s: Seconds from start to end.
        warnings: What went wrong beside it, one sentence each.
    """

    exit_code: int
    wall_s: float
    warnings: tuple[str, ...] = ()


def start(
    plan: LaunchPlan, masked: LaunchPlan, environ: Mapping[str, str], display: Display
) -> Receipt:
    """Start this node's processes, stay with them, and give the receipt.

    Args:
        plan: What to start.
        masked: The same without secrets; all that is written to disk comes from it.
        environ: The environment as the user has it.
        display: Shows the output of the script and the progress.

    Raises:
        FasttrainError: Nothing could be started.
    """
    environment = compose(environ, plan.environment)
    program = find_program(plan, environment)
    check_port(plan.processes.value)
    create(masked)
    ended = attend(plan, (program, environment), log_name(plan), display, NoWatch())
    return gather(masked, ended.exit_code, ended.wall_s, ended.warnings)


def attend(
    plan: LaunchPlan,
    program: tuple[str, Mapping[str, str]],
    log: str,
    display: Display,
    watch: Watch,
) -> Ended:
    """Start this node's processes and stay with them to their end.

    Args:
        plan: What to start; its run directory is there already.
        program: Path of the program and the environment of its process.
        log: Name of the log in the run directory.
        display: Shows the output of the script and the progress.
        watch: Hears of signals, and is asked a few times a second.

    Raises:
        FasttrainError: The program can't be started.
    """
    run_dir = Path(plan.run_dir)
    relay = Relay(run_dir / log, display)
    events = EventTail(run_dir / f"events-{first_rank(plan)}.jsonl")
    others = RankTails(run_dir, partial(_follows, plan, log))

    def tick() -> None:
        for line in others.lines():
            display.write(1, line)
        if event := events.latest():
            display.progress(event)
        watch.tick()

    started_s = time.monotonic()
    try:
        stop = Stop(plan.shutdown_timeout_s, display.tell, watch.heard)
        end = supervise(program[0], plan.argv, program[1], relay, tick, stop)
    finally:
        relay.finish()
        for line in others.lines(rest=True):
            display.write(1, line)
        display.close()
    wall_s = time.monotonic() - started_s
    lost = (f"the log in {run_dir} is not whole: {relay.log_error}",) if relay.log_error else ()
    return Ended(end.exit_code, wall_s, (*end.warnings, *lost))


def compose(environ: Mapping[str, str], changes: tuple[EnvVar, ...]) -> dict[str, str]:
    """Give the environment of the processes."""
    result = dict(environ)
    for change in changes:
        if change.value is None:
            result.pop(change.name, None)
        else:
            result[change.name] = change.value
    return result


def first_rank(plan: LaunchPlan) -> int:
    """Give the lowest rank of this node."""
    processes = plan.processes.value
    return processes.node_rank * processes.nproc_per_node


def _shows(plan: LaunchPlan, rank: int) -> bool:
    return plan.show_ranks is None or rank in plan.show_ranks


def log_name(plan: LaunchPlan) -> str:
    """Give the name of the log of what this node's first process prints."""
    return "rank-0.log" if _relays_rank_0(plan) else "agent.log"


def _relays_rank_0(plan: LaunchPlan) -> bool:
    """Whether rank 0 writes to the relayed stream; in an elastic run it may be on any node."""
    elastic = plan.processes.value.rdzv_endpoint
    return not elastic and first_rank(plan) == 0 and _shows(plan, 0)


def _follows(plan: LaunchPlan, log: str, rank: int) -> bool:
    """Whether a rank's log is shown here: not where the output is that of one task of several."""
    return not log.startswith("task-") and _shows(plan, rank) and log != f"rank-{rank}.log"
