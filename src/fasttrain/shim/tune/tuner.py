"""Compares levers while the script trains, in blocks of steps that take turns.

All levers are installed and switched off. At the end of a step some are switched on, and off again
after a block of steps, so that neighbours in time are compared. What is compared next is written
down as a generator, `Tuner._search`, which is resumed after each step.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from fasttrain.files import write_private
from fasttrain.model.codec import dumps
from fasttrain.model.outcome import Outcome, State
from fasttrain.model.tuning import (
    TUNING_FILE,
    Compared,
    End,
    Parity,
    Tuning,
    TuningReport,
    Verdict,
)
from fasttrain.shim.hooks.device_clock import module_of
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.hooks.steps import StepMeter
from fasttrain.shim.tune.repeats import Repeats
from fasttrain.shim.tune.statistics import (
    PairedClocks,
    StepTime,
    block_steps,
    block_time,
    settled,
)

NOISE_SHARE = 10  # the part of the budget that goes to plain against plain is one of so many
ALPHA = 0.05  # that any verdict of one run is wrong
TURNS = 3  # most comparisons for each lever: two of its own, and without it or all together
LATE = "the budget was spent before its turn"
Levers = frozenset[str]
T = TypeVar("T")
Steps = Generator[None, None, T]  # resumed after each step


class Switched(Protocol):
    """A lever that can be switched off and on again between two steps."""

    recorder: OutcomeRecorder

    def switch(self, *, on: bool) -> None:
        """Have the next calls and steps be with the lever, or as without it."""

    def refresh(self) -> None:
        """Bring the recorder up to date."""


class Tuner:
    """Finds which of the levers make the script's steps faster.

    Args:
        asked: What to keep to.
        levers: The levers, in the order in which they are compared; all are switched off.
        rounds: What each of them rounds results by, relatively.
        meter: Knows the device.
        repeats: Repeats calls of the model with a lever and without.
        run_dir: Where the report is written.
        started_s: When the worker started, by `time.perf_counter`.

    Attributes:
        done: Whether there is nothing more to compare.
    """

    def __init__(
        self,
        asked: Tuning,
        levers: Mapping[str, Switched],
        rounds: Mapping[str, float],
        meter: StepMeter,
        repeats: Repeats,
        run_dir: Path,
        started_s: float,
    ) -> None:
        self.done = False
        self._levers, self._rounds = levers, rounds
        self._alpha = ALPHA / (TURNS * max(1, len(levers)))
        self._ratios: dict[tuple[Levers, Levers], PairedClocks] = {}
        self._meter = meter
        self._repeats = repeats
        self._path = run_dir / TUNING_FILE
        self._started_s = started_s
        self._until_s = started_s + asked.budget_s
        self._coin = random.Random(asked.seed)  # noqa: S311 - an order of blocks, no secret
        self._comparisons_left = 1
        self._on: Levers = frozenset(levers)
        self._set(frozenset())
        self._write(TuningReport("running", 0, 0.0))
        self._program = self._search()
        next(self._program)

    def after_step(self) -> None:
        """Go on to the next step, under the levers that are compared now."""
        if self.done:
            return
        try:
            next(self._program)
        except StopIteration:
            self.done = True
            end: End = "budget" if self._undecided() else "decided"
            self._write(replace(self._report, end=end, comparing=()))

    def finish(self) -> None:
        """Note that the script has ended, unless everything was decided before."""
        if not self.done:
            self.done = True
            self._write(replace(self._report, end="script"))

    def _search(self) -> Steps[None]:
        self._comparisons_left = NOISE_SHARE
        yield  # the first step, which creates what later ones find
        plain: Levers = frozenset()
        yield from self._settle(plain)
        noise = yield from self._compare((), plain, plain)
        self._write(replace(self._report, noise=noise))
        self._comparisons_left = 2 * len(self._levers)
        for name in self._levers:
            yield from self._try(name)
        undecided, kept = self._undecided(), self._report.kept
        self._comparisons_left = len(undecided) + (len(kept) if len(kept) > 1 else 0)
        for name in undecided:
            if not self._late():
                yield from self._try(name)
        yield from self._leave_out()
        changed = frozenset(self._report.kept)
        # What is quoted later is the ratio to plain, also where one lever is left of several.
        if changed and (plain, changed) not in self._ratios:
            together = yield from self._compare(self._report.kept, plain, changed)
            self._write(replace(self._report, together=together))

    def _try(self, name: str) -> Steps[None]:
        """Compare all that is kept with a lever and without it."""
        kept = frozenset(self._report.kept)
        found = yield from self._compare((name,), kept, kept | {name})
        others = [one for one in self._report.compared if one.levers != (name,)]
        for before in self._report.compared:
            if before.levers == (name,):  # what its first use took was seen then
                steps, first_use_s = before.steps + found.steps, before.first_use_s
                found = replace(found, steps=steps, first_use_s=first_use_s)
        order = list(self._levers)
        compared = sorted([*others, found], key=lambda one: order.index(one.levers[0]))
        self._write(replace(self._report, compared=tuple(compared)))

    def _undecided(self) -> list[str]:
        compared = self._report.compared
        return [name for one in compared if one.verdict == "undecided" for name in one.levers]

    def _leave_out(self) -> Steps[None]:
        """Compare all that is kept without each lever that was kept before the last one."""
        for name in self._report.kept[:-1]:
            kept = frozenset(self._report.kept)
            found = yield from self._compare((name,), kept - {name}, kept, known_right=True)
            if found.verdict == "slower":
                rest = " and ".join(other for other in self._report.kept if other != name)
                reason = f"slower together with {rest}"
                self._write(
                    replace(
                        self._report,
                        compared=tuple(
                            replace(
                                found,
                                reason=reason,
                                first_use_s=one.first_use_s,
                                parity=one.parity,
                            )
                            if one.levers == (name,)
                            else one
                            for one in self._report.compared
                        ),
                    )
                )

    def _compare(
        self, levers: tuple[str, ...], base: Levers, changed: Levers, *, known_right: bool = False
    ) -> Steps[Compared]:
        """Compare two sets of levers until the faster one is known or its share of time is over."""
        self._write(replace(self._report, comparing=levers))
        found = Compared(levers, self._asked(levers), "undecided", PairedClocks(ALPHA).ratio())
        if self._late():
            return replace(found, reason=LATE)
        until_s, first_step = self._share(), self._meter.steps
        before = yield from self._settle(base)
        since = yield from self._settle(changed)
        if idle := self._idle(levers):
            return replace(found, verdict="no effect", reason=idle)
        first_use_s = max(0.0, sum(since) - len(since) * statistics.median(since))
        parity = None
        if levers and not known_right:
            parity = yield from self._parity(levers, changed)
            if parity.right is False:
                return replace(found, verdict="wrong", parity=parity, reason=_wrong(parity))
        timed = yield from self._time(base, changed, block_steps([*before, *since]), until_s)
        kept, reason = _judge(timed.verdict, parity, known_right=known_right)
        return replace(
            timed,
            levers=levers,
            asked=found.asked,
            steps=self._meter.steps - first_step,
            first_use_s=first_use_s if levers else 0.0,
            parity=parity,
            kept=kept and bool(levers),
            reason=reason,
        )

    def _time(self, base: Levers, changed: Levers, length: int, until_s: float) -> Steps[Compared]:
        """Time pairs of blocks until the faster side is known or the time is over."""
        ratios = self._ratios.setdefault((base, changed), PairedClocks(self._alpha))
        plain_s: list[float] = []
        changed_s: list[float] = []
        while ratios.verdict() == "undecided" and time.perf_counter() < until_s:
            without, with_it = yield from self._pair(base, changed, length)
            ratios.add(without, with_it)
            plain_s.append(without.wall_s)
            changed_s.append(with_it.wall_s)
        return Compared(
            levers=(),
            asked="",
            verdict=ratios.verdict(),
            ratio=ratios.ratio(),
            step_s=_median(changed_s),
            plain_step_s=_median(plain_s),
            pairs=len(ratios),
        )

    def _asked(self, levers: tuple[str, ...]) -> str:
        return self._levers[levers[0]].recorder.asked if len(levers) == 1 else ""

    def _share(self) -> float:
        """Return until when the comparison that begins now may last."""
        now_s = time.perf_counter()
        share_s = max(0.0, self._until_s - now_s) / max(1, self._comparisons_left)
        self._comparisons_left -= 1
        return now_s + share_s

    def _late(self) -> bool:
        return time.perf_counter() >= self._until_s

    def _idle(self, levers: tuple[str, ...]) -> str:
        """Return why a lever that is switched on does nothing; empty if it does something."""
        for name in levers:
            outcome = self._outcome(name)
            if outcome.state is not State.APPLIED:
                return outcome.reason or outcome.state.value
        return ""

    def _outcome(self, name: str) -> Outcome:
        lever = self._levers[name]
        lever.refresh()
        return lever.recorder.outcome()

    def _settle(self, on: Levers) -> Steps[list[float]]:
        """Take steps until their times fall no more, and return these times, in seconds."""
        self._set(on)
        times: list[float] = []
        while not settled(times) and not self._late():
            times.append((yield from self._timed(1)).wall_s)
        return times or [0.0]

    def _pair(self, base: Levers, changed: Levers, length: int) -> Steps[tuple[StepTime, StepTime]]:
        """Return the times of a step without and with, from two blocks in random order."""
        first_changed = self._coin.random() < 0.5
        taken: list[StepTime] = []
        for side in (changed, base) if first_changed else (base, changed):
            self._set(side)
            yield  # what a switch costs once isn't timed
            taken.append((yield from self._timed(length)))
        return (taken[1], taken[0]) if first_changed else (taken[0], taken[1])

    def _timed(self, steps: int) -> Steps[StepTime]:
        """Take steps, and return the time of one.

        On a device it is their mean, since waiting for each would hold it up. The processor's time
        says nothing there, and the wall's stands in its place.
        """
        device = torch.device(self._meter.device or "cpu")
        module = module_of(device)
        if module is None:
            return block_time((yield from self._timed_one_by_one(steps)))
        module.synchronize(device)
        began_s = time.perf_counter()
        for _ in range(steps):
            yield
        module.synchronize(device)
        wall_s = (time.perf_counter() - began_s) / steps
        return StepTime(wall_s, wall_s)

    def _timed_one_by_one(self, steps: int) -> Steps[list[StepTime]]:
        times: list[StepTime] = []
        for _ in range(steps):
            wall_s, processor_s = time.perf_counter(), time.process_time()
            yield
            times.append(StepTime(time.perf_counter() - wall_s, time.process_time() - processor_s))
        return times

    def _parity(self, levers: tuple[str, ...], changed: Levers) -> Steps[Parity]:
        """Compare the results of one step with those of plain calls, and with those in fp64."""
        plain: Levers = frozenset()
        self._set(plain)
        rounds = max(self._rounds[it] for it in changed)
        around_step = getattr(self._levers[levers[0]], "around_step", None)
        if around_step is not None:
            with self._repeats.of_step(around_step, rounds) as found:
                yield
            return found()
        with self._repeats.of_calls(rounds, eager="compile" not in changed) as compare:
            yield
        return compare(lambda: self._set(plain), lambda: self._set(changed))

    def _set(self, on: Levers) -> None:
        for name, lever in self._levers.items():
            if (name in on) != (name in self._on):
                lever.switch(on=name in on)
        self._on = on

    def _write(self, report: TuningReport) -> None:
        wall_s = time.perf_counter() - self._started_s
        self._report = replace(report, steps=self._meter.steps, wall_s=wall_s)
        write_private(self._path, dumps(self._report), durable=False)


def _judge(verdict: Verdict, parity: Parity | None, *, known_right: bool) -> tuple[bool, str]:
    """Return whether a lever is kept whose results aren't known to be wrong, and why not."""
    reasons: dict[Verdict, str] = {
        "slower": "steps are slower with it",
        "same": "steps take as long without it",
        "undecided": "the times of steps scatter too much to tell within its share of the budget",
    }
    if verdict != "faster":
        return False, reasons[verdict]
    if known_right:
        return True, ""
    if parity is None or parity.right is None:
        why = parity.reason if parity is not None else "nothing was compared"
        return False, f"faster, but whether its results are right isn't known: {why}"
    return True, ""


def _wrong(parity: Parity) -> str:
    return f"its results are wrong: {parity.reason}"


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0
