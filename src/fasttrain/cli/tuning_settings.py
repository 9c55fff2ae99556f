"""Compares settings of the process at the end of ``fasttrain tune``, by runs that take turns.

Each value is compared with the present one: two runs of the script start beside each other, with
the levers that were kept, and train in turns. A value that is faster and right is the present one
from then on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from fasttrain.cli.beside import judged, lacking, proof_of, receipt_of, run_side, why_failed
from fasttrain.files import write_private
from fasttrain.launch.alternation import COMPARED, Alternation
from fasttrain.launch.sides import Sides
from fasttrain.model.codec import dumps
from fasttrain.model.levers import LEVERS
from fasttrain.model.machine import Machine
from fasttrain.model.plan import Invocation, LaunchPlan
from fasttrain.model.proof import Curves, Side
from fasttrain.model.settings import Settings
from fasttrain.model.tuning import (
    REORDERED,
    TUNING_FILE,
    UNBOUNDED,
    Compared,
    Parity,
    Ratio,
    TuningReport,
    Verdict,
)
from fasttrain.planning.describe import counted
from fasttrain.planning.plan import make_plan
from fasttrain.planning.process_settings import (
    RANKS,
    THREADS,
    THREADS_VARIABLE,
    Candidate,
    Value,
    with_values,
)
from fasttrain.planning.proof import CONTROLS, plain_settings, plan_turns, without_levers
from fasttrain.statistics import curves
from fasttrain.statistics.paired import ALPHA, MOST_WARM_UP_STEPS, PairedClocks, excluded

LOSSES_SHARE = 0.4  # of a comparison's time, for the losses of plain runs where they are needed
LEAST_S = 25.0  # of a comparison: less decides nothing, while two runs start
LOSSES = 30  # steps whose losses are compared
KNOWN_STEPS = 5  # to warm up what an earlier start has timed
MOST_IN_VAIN = 2  # starts in a row that ended before anything was timed
END_S = 3.0  # for a script to end after it was told to, once the budget is over
# A thread of Intel's OpenMP looks for work for 200 ms before it sleeps, GNU's for some 10 ms.
# Source: Intel oneAPI DPC++/C++ compiler 2025, "Supported Environment Variables", KMP_BLOCKTIME
PAUSE_S = 0.25
_ENDLESS = 10**9  # steps
_LATE = "the budget was spent before its turn"
_SCATTER = "the times of steps scatter too much to tell within its share of the budget"
_FEW = "too few pairs of blocks were timed within its share of the budget"
_BY_ITSELF = "with either value: the script, or a library, sets the number itself"
_SHARED = "ranks share the cores evenly"


@dataclass(frozen=True, slots=True)
class Ground:
    """What all runs have in common.

    Attributes:
        settings: The settings, with the levers that were kept.
        machine: The machine.
        invocation: The call of fasttrain.
        until_s: When the budget is over, by `time.monotonic`.
        quiet: Whether nothing is told.
    """

    settings: Settings
    machine: Machine
    invocation: Invocation
    until_s: float
    quiet: bool


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two runs beside each other, with the present value and with a candidate."""

    sides: Sides
    plans: Mapping[Side, LaunchPlan]

    def failure(self, side: Side) -> str:
        """Return why a side failed; empty if it hasn't."""
        code = self.sides.exit_code(side)
        return why_failed(code, receipt_of(self.plans[side])) if code else ""

    def peak_bytes(self, side: Side) -> int:
        """Return the most resident memory of a side's run; 0 if it isn't known."""
        receipt = receipt_of(self.plans[side])
        return sum(rank.stats.peak_memory_bytes for rank in receipt.ranks) if receipt else 0

    def lacking(self, side: Side) -> str:
        """Return what a side lacked because the other one ran beside it; empty if nothing."""
        return lacking(receipt_of(self.plans[side]))


class SettingsSearch:
    """Finds which values of settings make steps faster.

    Args:
        ground: What all runs have in common.
        candidates: The values, in the order in which they are compared.
        report: What was found about levers.

    Attributes:
        report: What was found.
        signum: The signal that asked for the end; 0 while none did.
    """

    def __init__(
        self, ground: Ground, candidates: Sequence[Candidate], report: TuningReport
    ) -> None:
        self.report = report
        self.signum = 0
        self._ground, self._candidates = ground, candidates
        self._alpha = ALPHA / len(candidates)
        self._present: dict[str, Value] = {}
        # Values that need no comparison (any more), each with its variable or option.
        self._known: set[tuple[str, str]] = set()
        self._began_s, self._before_s = time.monotonic(), report.wall_s

    def run(self) -> None:
        """Compare all candidates, as far as the budget goes."""
        left = list(self._candidates)
        while left and not self.signum:
            candidate = left.pop(0)
            # As long as the present value isn't known, one of those that are left is likely it.
            threads = any(one.setting == THREADS for one in left)
            comparisons = len(left) + (0 if threads and not self._known else 1)
            now_s, until_s = time.monotonic(), self._ground.until_s
            share_s = max(LEAST_S, (until_s - now_s) / max(1, comparisons))
            self._try(candidate, min(until_s, now_s + share_s))
            left = [one for one in left if (one.name, one.value) not in self._known]
        self._note(())

    def _try(self, candidate: Candidate, until_s: float) -> None:
        """Compare a candidate, and keep it if it is faster and right."""
        self._tell(candidate)
        self._note((), comparing=(candidate.setting,))
        found = self._compare(candidate, until_s)
        if found is None:  # it is the present one
            return
        self._known.add((candidate.name, candidate.value))
        if found.kept:
            self._present[candidate.name] = candidate.tried
            if candidate.setting == RANKS:
                self._drop_threads()
        late = found.verdict == "undecided" and found.reason in (_LATE, _SCATTER, _FEW)
        self._note((found,), late=late)

    def _drop_threads(self) -> None:
        """Keep no number of threads, which was found for one process."""
        if self._present.pop(THREADS_VARIABLE, None):
            of_one = (
                replace(one, kept=False, reason=_SHARED)
                if one.kept and one.levers == (THREADS,)
                else one
                for one in self.report.settings
            )
            self.report = replace(self.report, settings=tuple(of_one))

    def _tell(self, candidate: Candidate) -> None:
        if not self._ground.quiet:
            sys.stderr.write(f"fasttrain: {candidate.setting} {candidate.shown} ...\n")

    def _note(
        self, found: tuple[Compared, ...], *, comparing: tuple[str, ...] = (), late: bool = False
    ) -> None:
        self.report = replace(
            self.report,
            settings=(*self.report.settings, *found),
            steps=self.report.steps + sum(one.steps for one in found),
            comparing=comparing,
            wall_s=self._before_s + time.monotonic() - self._began_s,
            end="budget" if late else self.report.end,
        )
        path = Path(self._ground.invocation.run_dir, TUNING_FILE)
        write_private(path, dumps(self.report), durable=False)

    def _compare(self, candidate: Candidate, until_s: float) -> Compared | None:
        """Compare a candidate with the present value; None if that is the same."""
        present = self._present.get(candidate.name)
        found = Compared(
            (candidate.setting,),
            candidate.shown,
            "undecided",
            Ratio(0.0, 1.0, UNBOUNDED),
            against=f"{present.value} {candidate.setting}" if present else candidate.against,
            variable=f"{candidate.name}={candidate.value}",
        )
        if time.monotonic() >= until_s:
            return replace(found, reason=_LATE)
        timed = self._time(candidate, found, until_s)
        if timed is None or timed.verdict != "faster":
            return timed
        parity = timed.parity or self._parity(candidate, until_s)
        if parity.right is False:
            reason = f"it trains something else: {parity.reason}"
            return replace(timed, verdict="wrong", parity=parity, reason=reason)
        kept, reason = parity.right is True and not self.signum, ""
        if not kept:
            reason = f"faster, but whether it trains the same isn't known: {parity.reason}"
        return replace(timed, parity=parity, kept=kept, reason=reason)

    def _time(self, candidate: Candidate, found: Compared, until_s: float) -> Compared | None:
        """Time pairs of blocks, in as many starts of the script as it takes."""
        clocks = PairedClocks(self._alpha, wall_alone=True)
        reserve_s = LOSSES_SHARE * (until_s - time.monotonic())
        in_vain = 0
        for start in count(1):
            label = _label(candidate) + (f"-{start}" if start > 1 else "")
            before = len(clocks)
            with self._beside(candidate, label, until_s, levers=True) as pair:
                turns = _turns(pair, clocks, until_s, reserve_s, candidate.setting)
                turns.run()
                pair.sides.end(*COMPARED)
            threads = {side: turns.runs[side].threads for side in COMPARED}
            found = _with_times(found, turns, candidate)
            found = replace(
                found,
                peak_bytes=max(found.peak_bytes, pair.peak_bytes("chosen")),
                plain_peak_bytes=max(found.plain_peak_bytes, pair.peak_bytes("plain")),
            )
            if candidate.setting == THREADS and 0 < threads["plain"] == threads["chosen"]:
                return self._same_threads(candidate, found, threads["plain"])
            if threads["plain"]:
                self._known.add((THREADS_VARIABLE, str(threads["plain"])))
            if done := self._over(pair, found, turns, _late(turns, until_s, reserve_s)):
                return done
            in_vain = 0 if len(clocks) > before else in_vain + 1
            if in_vain == MOST_IN_VAIN:
                steps = f"{turns.steps:,} steps"
                reason = f"the script ended after {steps}, before their times had settled"
                return replace(found, reason=reason)
        raise AssertionError("unreachable: the count has no end")

    def _same_threads(self, candidate: Candidate, found: Compared, threads: int) -> Compared | None:
        """Return what is known where both runs have as many threads; None if that is no finding."""
        self._known.add((candidate.name, str(threads)))
        if str(threads) == candidate.value:
            return None
        self._known |= {(one.name, one.value) for one in self._candidates if one.setting == THREADS}
        reason = f"torch has {counted(threads, 'thread')} {_BY_ITSELF}"
        return replace(found, verdict="no effect", reason=reason)

    def _over(
        self, pair: _Pair, found: Compared, turns: Alternation, late: bool
    ) -> Compared | None:
        """Return what was found if no other start follows; else None."""
        if self.signum:
            return replace(found, reason="it was interrupted")
        for side in COMPARED:
            if pair.failure(side) and (why := pair.lacking(side)):
                return replace(found, verdict="undecided", reason=why)
        if why := pair.failure("plain"):
            return replace(found, reason=f"the script fails: {why}")
        if why := pair.failure("chosen"):
            return replace(found, verdict="wrong", reason=f"the script fails with it only: {why}")
        if not late and (why := _other_length(turns)):
            return replace(found, verdict="wrong", reason=why)
        if found.verdict != "undecided":
            reasons: dict[Verdict, str] = {
                "slower": "steps are slower with it",
                "same": "steps take as long without it",
            }
            alike = curves.compare(turns.runs["plain"].losses, turns.runs["chosen"].losses)
            same = alike.finding == "same bits"
            parity = _parity_of(alike) if found.verdict == "faster" and same else None
            return replace(found, reason=reasons.get(found.verdict, ""), parity=parity)
        if late:
            few = not excluded(found.pairs, self._alpha)
            return replace(found, reason=_FEW if few else _SCATTER)
        return None

    def _parity(self, candidate: Candidate, until_s: float) -> Parity:
        """Compare the losses of plain runs, for which it is known how far rounding leads."""
        label = f"{_label(candidate)}-losses"
        with self._beside(candidate, label, until_s, levers=False) as pair:
            turns = Alternation(pair.sides, LOSSES)
            turns.run()
            pair.sides.end(*COMPARED)
            found = judged(pair.sides, turns)
        if pair.failure("plain") or pair.failure("chosen"):
            return Parity(None, "the script fails without levers")
        if time.monotonic() >= until_s and found.finding == "can't tell":
            return Parity(None, "its share of the budget was spent")
        return _parity_of(found)

    @contextmanager
    def _beside(
        self, candidate: Candidate, label: str, until_s: float, *, levers: bool
    ) -> Iterator[_Pair]:
        """Have two runs beside each other in the block."""
        plans: dict[Side, LaunchPlan] = {}
        sides = Sides(
            lambda side: run_side(plans[side], self._ground.invocation),
            until_s=until_s,
            end_s=END_S,
        )
        ends = sides.prepare(COMPARED if levers else (*COMPARED, *CONTROLS))
        for side, end in ends.items():
            plans[side] = self._plan(candidate, side, label, end, levers=levers)
        try:
            with sides.attended():
                sides.start(*COMPARED)
                yield _Pair(sides, plans)
        finally:
            self.signum = self.signum or sides.signum

    def _plan(
        self, candidate: Candidate, side: Side, label: str, end: int, *, levers: bool
    ) -> LaunchPlan:
        ground, invocation = self._ground, self._ground.invocation
        values = dict(self._present)
        if side == "chosen":
            values[candidate.name] = candidate.tried
            if candidate.setting == RANKS:
                values.pop(THREADS_VARIABLE, None)
        settings = ground.settings if levers else plain_settings(ground.settings)
        settings, variables = with_values(settings, values.values())
        of_side = replace(
            invocation,
            run_id=f"{invocation.run_id}-{label}-{side}",
            run_dir=f"{invocation.run_dir}/{label}-{side}",
            tuned=variables,
        )
        plan = make_plan(settings, ground.machine, of_side)
        if not levers:
            kind = plan.device_kind.value
            off = {name: row.off_value(kind, settings) for name, row in LEVERS.items()}
            if plan.levers.strategy.value.injected:  # without it the ranks would be no one run
                del off["strategy"]
            plan = without_levers(plan, off)
        proof = proof_of(side, plan, end, REORDERED, apart=True)
        return plan_turns(plan, proof, invocation.environ)


def _label(candidate: Candidate) -> str:
    return f"{candidate.setting}-{candidate.shown.replace(' ', '-')}"


def _turns(
    pair: _Pair, clocks: PairedClocks, until_s: float, reserve_s: float, setting: str
) -> Alternation:
    """Return the turns of two runs, which end once the verdict is known or it is too late."""

    def enough() -> bool:
        plain, chosen = (turns.runs[side].threads for side in COMPARED)
        alike = setting == THREADS and 0 < plain == chosen
        decided = clocks.verdict() != "undecided" or alike
        return decided or bool(pair.sides.signum) or _late(turns, until_s, reserve_s)

    warm_up = KNOWN_STEPS if len(clocks) else MOST_WARM_UP_STEPS
    turns = Alternation(
        pair.sides, _ENDLESS, clocks=clocks, enough=enough, warm_up=warm_up, pause_s=PAUSE_S
    )
    return turns


def _late(turns: Alternation, until_s: float, reserve_s: float) -> bool:
    """True if no more time is left: some is kept for plain runs if the losses have parted."""
    plain, chosen = (turns.runs[side].losses[: turns.steps] for side in COMPARED)
    return time.monotonic() >= until_s - (reserve_s if plain != chosen else 0.0)


def _other_length(turns: Alternation) -> str:
    """Return how the script ends earlier on one side; empty if it doesn't, as far as is known."""
    plain, chosen = (turns.runs[side] for side in COMPARED)
    steps, others = len(chosen.losses), len(plain.losses)
    if chosen.ended and steps < others:
        return f"the script ends after {steps:,} steps with it only"
    if plain.ended and others < steps:
        return f"the script ends after {others:,} steps without it only"
    return ""


def _with_times(found: Compared, turns: Alternation, candidate: Candidate) -> Compared:
    """Return what is known after a start of the script."""
    speed = turns.speed()
    threads = turns.runs["plain"].threads if candidate.setting == THREADS else 0
    found = replace(
        found,
        steps=found.steps + sum(len(turns.runs[side].losses) for side in COMPARED),
        against=str(threads) if threads else found.against,
        verdict=turns.clocks.verdict(),
        ratio=turns.clocks.ratio(),
        pairs=len(turns.clocks),
    )
    if speed is None:
        return found
    return replace(found, step_s=speed.step_s, plain_step_s=speed.plain_step_s)


def _parity_of(found: Curves) -> Parity:
    """Return what two curves of losses say about a setting."""
    right = {"same bits": True, "within rounding": True, "differs": False, "can't tell": None}
    far = [part for part in found.windows if part.apart is not None and part.allowed]
    worst = max(far, key=lambda part: (part.apart or 0.0) / (part.allowed or 1.0), default=None)
    if worst is None:
        return Parity(right[found.finding], found.reason)
    return Parity(right[found.finding], found.reason, worst.apart or 0.0, worst.allowed or 0.0)
