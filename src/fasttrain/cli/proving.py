"""Perform ``fasttrain run --prove``: compare a run with one of plain python."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fasttrain.cli.beside import (
    Children,
    judged,
    lacking,
    proof_of,
    receipt_of,
    run_side,
    why_failed,
)
from fasttrain.cli.cards.tuning import IN_CHILDREN
from fasttrain.cli.console import envelope
from fasttrain.cli.requests import RunRequest
from fasttrain.cli.tuned import plan_run
from fasttrain.files import write_private
from fasttrain.launch.alternation import ALPHA, COMPARED, Alternation
from fasttrain.launch.receipts import trains_in_children
from fasttrain.launch.run_dir.lock import begin, claim
from fasttrain.launch.sides import Sides
from fasttrain.model.codec import dumps
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.levers import LEVERS
from fasttrain.model.machine import Machine
from fasttrain.model.outcome import Outcome, Receipt, State
from fasttrain.model.plan import Invocation, LaunchPlan
from fasttrain.model.proof import PROOF_FILE, Curves, End, ProofReport, Side
from fasttrain.model.settings import Settings
from fasttrain.planning.plan import make_plan
from fasttrain.planning.process_settings import THREADS_VARIABLE
from fasttrain.planning.proof import (
    SIDES,
    STEPS,
    check,
    compared,
    of_one_attempt,
    one_process,
    plan_side,
    python_settings,
    rounding,
)
from fasttrain.statistics.paired import PairedClocks

TELL_S = 5.0  # between two lines about progress
_NO_STEPS = "no optimizer step was seen"


def prove(request: RunRequest, settings: Settings, machine: Machine, invocation: Invocation) -> int:
    """Perform the command; return 0 if the losses are the same but for rounding.

    Else it is `ExitCode.DIFFERS`, the script's own exit code if it failed without levers, too, or
    `ExitCode.UNAVAILABLE` if that couldn't be found out.
    """
    plan_run(settings, machine, invocation)  # a mistake in the request is reported as in any run
    children = Children(Path(invocation.run_dir, "chosen"))

    def look() -> None:
        if children.train_alone():
            sides.give_up()

    sides = Sides(lambda side: run_side(plans[side], invocation), look)
    ends = sides.prepare(SIDES)
    apart = not request.keep_writes
    plans = _plans(settings, machine, invocation, ends, apart=apart)
    quiet = settings.quiet.value
    steps = settings.max_steps.value or STEPS
    if not quiet:
        sys.stderr.write(_announced(plans["chosen"], steps, apart=apart))
    with claim(invocation.run_dir) as claimed:
        begin(claimed, PROOF_FILE, dumps(ProofReport("running", 0, 0.0, _unknown("it runs"))))
        report, code = _compare(sides, plans, steps, quiet=quiet)
        write_private(Path(invocation.run_dir, PROOF_FILE), dumps(report))
    _print(report, plans["chosen"], invocation.run_dir, as_json=request.json, quiet=quiet)
    return code


def _plans(
    settings: Settings,
    machine: Machine,
    invocation: Invocation,
    ends: Mapping[Side, int],
    *,
    apart: bool,
) -> dict[Side, LaunchPlan]:
    """Return the plan of each side."""
    plans: dict[Side, LaunchPlan] = {}
    rounded = 0.0
    settings = of_one_attempt(settings)
    plain = python_settings(settings)
    for side in sorted(SIDES):  # the chosen levers, which come first, say by what controls round
        run_id, run_dir = f"{invocation.run_id}-{side}", f"{invocation.run_dir}/{side}"
        of_side = replace(invocation, run_id=run_id, run_dir=run_dir)
        if side == "chosen":
            plan = plan_run(settings, machine, of_side)
            check(plan)
            _check_system(plan)
            rounded = rounding(plan)
            if plan.levers.strategy.value.injected:  # a lever, too: plain python is one process
                plain = one_process(plain)
        else:
            plan = make_plan(plain, machine, of_side)
        proof = proof_of(side, plan, ends[side], rounded, apart=apart)
        kind = plan.device_kind.value
        off = {name: row.off_value(kind, settings) for name, row in LEVERS.items()}
        plans[side] = plan_side(plan, proof, off=off, environ=invocation.environ)
    return plans


def _check_system(plan: LaunchPlan) -> None:
    if plan.processes.value.backend != "direct" and sys.platform != "linux":
        raise FasttrainError(
            "these processes can't be proved",
            why="they fetch their turns from a socket with an abstract name, which Linux alone has",
            fix="prove it with one process: --nproc-per-node 1",
            slug="prove-ranks",
        )


def _announced(plan: LaunchPlan, steps: int, *, apart: bool) -> str:
    on = ", ".join(f"{name} {word}" for name, word in compared(plan).items())
    writes = "thrown away" if apart else "kept"
    ranks = plan.processes.value.world_size
    of = f" of {ranks} ranks" if ranks > 1 else ""
    plain = "of one process without" if plan.levers.strategy.value.injected else "without"
    return (
        f"fasttrain: comparing {steps:,} steps{of} with {on} and {plain}, in turns;"
        f" what the script writes is {writes}, and random numbers that it doesn't seed are seeded\n"
    )


class _Progress:
    """Tells from time to time how far the runs are."""

    def __init__(self, steps: int, *, quiet: bool) -> None:
        self._steps, self._quiet = steps, quiet
        self._told_s = time.monotonic()

    def tell(self, taken: int) -> None:
        """Print how many steps were taken, at most every `TELL_S`."""
        if not self._quiet and time.monotonic() - self._told_s >= TELL_S:
            self._told_s = time.monotonic()
            sys.stderr.write(f"fasttrain: step {taken:,} of {self._steps:,} ...\n")


def _compare(
    sides: Sides, plans: Mapping[Side, LaunchPlan], steps: int, *, quiet: bool
) -> tuple[ProofReport, int]:
    """Run all sides, and return the report and the exit code."""
    began_s = time.monotonic()
    # What tune has kept may give the two different numbers of threads. And what rank 0 has computed
    # with, of several, isn't what a step takes.
    threads = [_variable(plans[side], THREADS_VARIABLE) for side in COMPARED]
    several = plans["chosen"].processes.value.world_size > 1
    clocks = PairedClocks(ALPHA, wall_alone=several or threads[0] != threads[1])
    turns = Alternation(sides, steps, _Progress(steps, quiet=quiet).tell, clocks=clocks)
    with sides.attended():
        sides.start(*COMPARED)
        turns.run()
        sides.end(*COMPARED)
        found = judged(sides, turns)
    followed = tuple(turns.runs)
    receipts = {side: receipt_of(plans[side]) for side in followed}
    codes = {side: sides.exit_code(side) for side in followed}
    failed: dict[str, str] = {}
    if not sides.signum:
        failed = {side: why_failed(codes[side], receipts[side]) for side in followed if codes[side]}
    in_children = trains_in_children(Path(plans["chosen"].run_dir))
    chosen = receipts["chosen"]
    levers = _outcomes(chosen) if chosen else ()
    applied = any(outcome.state is State.APPLIED for outcome in levers)
    report = ProofReport(
        end=_end(turns, sides, failed),
        steps=turns.steps,
        wall_s=time.monotonic() - began_s,
        curves=_interrupted(found)
        if sides.signum
        else _with_failures(found, turns, failed, receipts, in_children=in_children),
        speed=turns.speed(),
        levers=levers,
        losses={side: tuple(run.losses) for side, run in turns.runs.items()},
        failed=failed,
        notes=() if applied or not turns.steps else ("no lever took effect",),
    )
    script = ExitCode.UNAVAILABLE if lacking(receipts["plain"]) else codes["plain"] or 0
    return report, _exit_code(report, sides.signum, script)


def _variable(plan: LaunchPlan, name: str) -> str | None:
    return next((one.value for one in plan.environment if one.name == name), None)


def _end(turns: Alternation, sides: Sides, failed: Mapping[str, str]) -> End:
    if sides.signum:
        return "interrupted"
    if "plain" in failed or "chosen" in failed:
        return "failed"
    if sides.given_up:
        return "given up"
    return "steps" if turns.is_complete else "script"


def _with_failures(
    found: Curves,
    turns: Alternation,
    failed: Mapping[str, str],
    receipts: Mapping[Side, Receipt | None],
    *,
    in_children: bool = False,
) -> Curves:
    """Return what the curves say, or what failures say in their place."""
    chosen = receipts["chosen"]
    parted = {side: turns.runs[side].parted for side in COMPARED}
    if parted["plain"]:
        return replace(found, finding="can't tell", reason=f"the ranks part: {parted['plain']}")
    for side in COMPARED:
        if side in failed and (why := lacking(receipts[side])):
            return replace(found, finding="can't tell", reason=why)
    if "plain" in failed:
        return replace(found, finding="can't tell", reason="the script fails without levers, too")
    if "chosen" in failed:
        return replace(found, finding="differs", reason="the script fails with the levers only")
    if parted["chosen"]:
        why = f"the ranks part with the levers only: {parted['chosen']}"
        return replace(found, finding="differs", reason=why)
    if not turns.steps:
        return _unknown(IN_CHILDREN if in_children else _NO_STEPS)
    if own := _own_ranks(chosen):
        return replace(found, finding="can't tell", reason=own)
    lengths = [len(turns.runs[side].losses) for side in COMPARED]
    if found.finding != "differs" and lengths[0] != lengths[1]:
        why = f"the script ends after {lengths[1]} steps with the levers, {lengths[0]} without"
        return replace(found, finding="differs", reason=why)
    return found


def _outcomes(receipt: Receipt) -> tuple[Outcome, ...]:
    """Return what became of each lever, once where it is the same on several ranks."""
    found = (outcome for rank in receipt.ranks for outcome in rank.outcomes)
    once = {(it.lever, it.state, it.reason): it for it in found}
    return tuple(once.values())


def _own_ranks(chosen: Receipt | None) -> str:
    """Return why the chosen run isn't the training of one process; empty if it is."""
    outcomes = chosen.ranks[0].outcomes if chosen is not None and chosen.ranks else ()
    planned = LEVERS["strategy"].ceded
    found = (
        o.reason
        for o in outcomes
        if o.lever == "strategy" and o.asked not in planned and o.state is State.CEDED
    )
    return next(found, "")


def _interrupted(found: Curves) -> Curves:
    return replace(found, finding="can't tell", reason="it was interrupted")


def _unknown(why: str) -> Curves:
    return Curves("can't tell", why)


def _exit_code(report: ProofReport, signum: int, script: int) -> int:
    if signum == signal.SIGINT:
        return ExitCode.INTERRUPTED
    if signum:
        return 128 + signum
    if "plain" in report.failed:
        return script
    finding = report.curves.finding
    if finding == "differs":
        return int(ExitCode.DIFFERS)
    return int(ExitCode.UNAVAILABLE) if finding == "can't tell" else 0


def _print(
    report: ProofReport, plan: LaunchPlan, run_dir: str, *, as_json: bool, quiet: bool
) -> None:
    from fasttrain.cli.cards.crash import print_crash
    from fasttrain.cli.cards.proof import print_proof

    if as_json:
        sys.stdout.write(envelope("proof", report) + "\n")
        return
    side: Side = "plain" if "plain" in report.failed else "chosen"
    folder = Path(plan.run_dir).parent / side
    receipt = receipt_of(replace(plan, run_dir=str(folder)))
    if side in report.failed and receipt is not None and receipt.crash is not None:
        print_crash(receipt.crash, receipt.run_dir, brief=quiet)
    print_proof(report, run_dir)
