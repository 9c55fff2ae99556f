"""Runs a plan from its directory to its receipt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

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
        _show(others.lines(), display)
        if event := events.latest():
            display.progress(event)
        return watch.tick()

    started_s = time.monotonic()
    try:
        exit_code = supervise(program, plan.argv, environment, relay, tick)
    finally:
        relay.finish()
        watch.close()
        _show(others.lines(rest=True), display)
        display.close()
    wall_s = time.monotonic() - started_s
    exit_code = ExitCode.HUNG if watch.stopped else exit_code
    return gather(masked, exit_code, wall_s, tuple(_seen(watch, relay, run_dir)))


def _show(lines: Iterator[bytes], display: Display) -> None:
    for line in lines:
        display.write(1, line)


def _seen(watch: HangWatch, relay: Relay, run_dir: Path) -> Iterator[str]:
    """Tell what the launcher saw go wrong."""
    for hang in watch.hangs:
        yield f"no rank went on for {hang.quiet_s:.0f} s: see {HANG_FILE}"
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
