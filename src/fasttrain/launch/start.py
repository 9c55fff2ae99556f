"""Runs a plan from its directory to its receipt."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from fasttrain.launch.display import Display
from fasttrain.launch.follow import EventTail, RankTails
from fasttrain.launch.hang_watch import HangWatch
from fasttrain.launch.preflight import check_port, find_program
from fasttrain.launch.receipts import gather
from fasttrain.launch.relay import Relay
from fasttrain.launch.run_dir import create
from fasttrain.launch.supervise import supervise
from fasttrain.spec.errors import ExitCode
from fasttrain.spec.hang import HANG_FILE, Hang
from fasttrain.spec.outcome import Receipt
from fasttrain.spec.plan import EnvVar, LaunchPlan


def start(
    plan: LaunchPlan,
    masked: LaunchPlan,
    environ: Mapping[str, str],
    display: Display,
    on_hang: Callable[[Hang], None] = lambda _: None,
) -> Receipt:
    """Start this node's processes, stay with them, and give the receipt.

    Args:
        plan: What to start.
        masked: The same without secrets; all that is written to disk comes from it.
        environ: The environment as the user has it.
        display: Shows the output of the script and the progress.
        on_hang: Called when no rank goes on any more, before the run is stopped.

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
    watch = HangWatch(masked, on_hang)

    def tick() -> int | None:
        for line in others.lines():
            display.write(1, line)
        if event := events.latest():
            display.progress(event)
        return watch.tick()

    started_s = time.monotonic()
    try:
        exit_code = supervise(program, plan.argv, environment, relay, tick)
    finally:
        relay.finish()
        watch.close()
        for line in others.lines(rest=True):
            display.write(1, line)
        display.close()
    wall_s = time.monotonic() - started_s
    if watch.stopped:
        exit_code = ExitCode.HUNG
    lost = [f"the log in {run_dir} is not whole: {relay.log_error}"] if relay.log_error else []
    hung = [f"no rank went on for {hang.quiet_s:.0f} s: see {HANG_FILE}" for hang in watch.hangs]
    return gather(masked, exit_code, wall_s, (*hung, *lost))


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


def _relays_rank_0(plan: LaunchPlan) -> bool:
    """Whether rank 0 writes to the relayed stream; in an elastic run it may be on any node."""
    elastic = plan.processes.value.rdzv_endpoint
    return not elastic and _first_rank(plan) == 0 and _shows(plan, 0)


def _follows(plan: LaunchPlan, rank: int) -> bool:
    return _shows(plan, rank) and not (rank == 0 and _relays_rank_0(plan))
