"""Runs a plan from its directory to its receipt."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from fasttrain.launch.display import Display
from fasttrain.launch.follow import EventTail, RankTails
from fasttrain.launch.preflight import check_port
from fasttrain.launch.receipts import gather
from fasttrain.launch.relay import Relay
from fasttrain.launch.run_dir import create
from fasttrain.launch.supervise import supervise
from fasttrain.spec.outcome import Receipt
from fasttrain.spec.plan import EnvVar, LaunchPlan


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
    check_port(plan.processes.value)
    run_dir = create(masked)
    relay = Relay(run_dir / _stream_name(plan), display)
    events = EventTail(run_dir / f"events-{_first_rank(plan)}.jsonl")
    others = RankTails(run_dir, _followed_ranks(plan))

    def tick() -> None:
        for line in others.lines():
            display.write(1, line)
        if event := events.latest():
            display.progress(event)

    started_s = time.monotonic()
    try:
        exit_code = supervise(plan.argv, compose(environ, plan.environment), relay, tick)
    finally:
        relay.finish()
        for line in others.lines(rest=True):
            display.write(1, line)
        display.close()
    return gather(masked, exit_code, time.monotonic() - started_s)


def compose(environ: Mapping[str, str], changes: tuple[EnvVar, ...]) -> dict[str, str]:
    """Give the environment of the processes."""
    result = dict(environ)
    for change in changes:
        if change.value is None:
            result.pop(change.name, None)
        else:
            result[change.name] = change.value
    return result


def _first_rank(plan: LaunchPlan) -> int:
    processes = plan.processes.value
    return processes.node_rank * processes.nproc_per_node


def _shows(plan: LaunchPlan, rank: int) -> bool:
    return plan.show_ranks is None or rank in plan.show_ranks


def _stream_name(plan: LaunchPlan) -> str:
    """Give the log of the relayed stream: rank 0's, or the agent's own where that is elsewhere."""
    return "rank-0.log" if _first_rank(plan) == 0 and _shows(plan, 0) else "agent.log"


def _followed_ranks(plan: LaunchPlan) -> tuple[int, ...]:
    first = _first_rank(plan)
    local = range(first, first + plan.processes.value.nproc_per_node)
    relayed = {0} if _shows(plan, 0) else set()
    return tuple(rank for rank in local if _shows(plan, rank) and rank not in relayed)
