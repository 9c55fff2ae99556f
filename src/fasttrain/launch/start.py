"""Runs a plan from its directory to its receipt."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from fasttrain.launch.crash import Scene, investigate
from fasttrain.launch.display import Display
from fasttrain.launch.follow import EventTail, RankTails
from fasttrain.launch.preflight import check_port, find_program
from fasttrain.launch.receipts import gather
from fasttrain.launch.relay import Relay
from fasttrain.launch.run_dir import create
from fasttrain.launch.supervise import supervise
from fasttrain.spec.crash import Surroundings
from fasttrain.spec.outcome import Receipt
from fasttrain.spec.plan import EnvVar, LaunchPlan


def start(
    plan: LaunchPlan,
    masked: LaunchPlan,
    environ: Mapping[str, str],
    display: Display,
    look_around: Callable[[], Surroundings] = Surroundings,
) -> Receipt:
    """Start this node's processes, stay with them, and give the receipt.

    Args:
        plan: What to start.
        masked: The same without secrets; all that is written to disk comes from it.
        environ: The environment as the user has it.
        display: Shows the output of the script and the progress.
        look_around: Looks at the machine's memory, before the run and behind it.

    Raises:
        FasttrainError: Nothing could be started.
    """
    environment = compose(environ, plan.environment)
    program = find_program(plan, environment)
    check_port(plan.processes.value)
    run_dir = create(masked)
    relay = Relay(run_dir / ("rank-0.log" if _relays_rank_0(plan) else "agent.log"), display)
    events = EventTail(run_dir / f"events-{_first_rank(plan)}.jsonl")
    others = RankTails(run_dir, partial(_follows, plan))

    def tick() -> None:
        for line in others.lines():
            display.write(1, line)
        if event := events.latest():
            display.progress(event)

    before, started_s = look_around(), time.monotonic()
    try:
        exit_code = supervise(program, plan.argv, environment, relay, tick)
    finally:
        relay.finish()
        for line in others.lines(rest=True):
            display.write(1, line)
        display.close()
    wall_s = time.monotonic() - started_s
    scene = Scene(plan, masked, environ, exit_code, before, look_around(), _shown_ranks(plan))
    crash, unread = investigate(scene)
    if relay.log_error:
        unread += (f"the log in {run_dir} is not whole: {relay.log_error}",)
    # torchrun tells the first to fail by whole seconds; here, the ranks' own clocks do.
    return gather(masked, crash.exit_code if crash else exit_code, wall_s, unread, crash)


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


def _shown_ranks(plan: LaunchPlan) -> frozenset[int]:
    """Give the ranks of this node that are shown; in an elastic run, of all that may be here."""
    processes, first = plan.processes.value, _first_rank(plan)
    count = processes.world_size if processes.rdzv_endpoint else processes.nproc_per_node
    return frozenset(rank for rank in range(first, first + count) if _shows(plan, rank))


def _shows(plan: LaunchPlan, rank: int) -> bool:
    return plan.show_ranks is None or rank in plan.show_ranks


def _relays_rank_0(plan: LaunchPlan) -> bool:
    """Whether rank 0 writes to the relayed stream; in an elastic run it may be on any node."""
    elastic = plan.processes.value.rdzv_endpoint
    return not elastic and _first_rank(plan) == 0 and _shows(plan, 0)


def _follows(plan: LaunchPlan, rank: int) -> bool:
    return _shows(plan, rank) and not (rank == 0 and _relays_rank_0(plan))
