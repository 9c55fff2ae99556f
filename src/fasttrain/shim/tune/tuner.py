"""Compares levers while the script trains, in blocks of steps that take turns.

All levers are installed and switched off. At the end of a step some are switched on, and off again
after a block of steps, so that neighbours in time are compared. What is compared next is written
down as a generator, `Tuner._search`, which is resumed after each step. A script that ends before it
is through is started again, and goes on where it was (`Continued`).
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from fasttrain.files import write_private
from fasttrain.model.codec import dumps
from fasttrain.model.outcome import Outcome, State
from fasttrain.model.tuning import (
    TUNING_FILE,
    UNBOUNDED,
    Compared,
    End,
    Parity,
    Ratio,
    Tuning,
    TuningReport,
)
from fasttrain.shim.hooks.device_clock import module_of
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.hooks.steps import StepMeter
from fasttrain.shim.tune.confirmed import confirmed
from fasttrain.shim.tune.continued import Continued, Levers
from fasttrain.shim.tune.epochs import Epochs, Reading
from fasttrain.shim.tune.judged import beside, judge, tried_together, wrong
from fasttrain.shim.tune.ranks import Agreement
from fasttrain.shim.tune.repeats import Repeats
from fasttrain.statistics.paired import (
    StepTime,
    block_steps,
    block_time,
    settled,
    share,
)

# It fuses the casts of low precision, which cost most: what pays with it alone is found at once.
FIRST = "compile"
NOISE_SHARE = 10  # the part of the budget that goes to plain against plain is one of so many
KNOWN_STEPS = 2  # to warm up what an earlier start has compared
LATE = "the budget was spent before its turn"
MOST_TOGETHER = 1.25  # ratio by their own of levers that are compared once more, together
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
        levers: The levers, in the order in which they are compared, but for `FIRST`; all are
            switched off.
        rounds: What each of them rounds results by, relatively.
        meter: Knows the device.
        repeats: Repeats calls of the model with a lever and without.
        run_dir: Where the report is written.
        ranks: What all ranks have in common.

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
        ranks: Agreement,
    ) -> None:
        self.done = False
        self._pid = os.getpid()
        self._levers = {name: levers[name] for name in sorted(levers, key=FIRST.__ne__)}
        self._rounds = rounds
        self._continued = Continued(asked.earlier, run_dir, share(len(levers)))
        self._meter = meter
        self._repeats = repeats
        self._path = run_dir / TUNING_FILE
        self._ranks = ranks
        self._until_s = asked.budget_s
        self._coin = random.Random(asked.seed)  # noqa: S311 - an order of blocks, no secret
        self._comparisons_left = 1
        self._on: Levers = frozenset(levers)
        self._settled: tuple[Levers, list[float]] = (frozenset(), [])
        self._peak_bytes: dict[Levers, int] = {}
        self._epochs = Epochs()
        self._reading = Reading()
        self._set(frozenset())
        earlier = self._continued.earlier
        self._starts = earlier.starts + 1 if asked.earlier else 1
        if ranks.leads:
            begun = replace(earlier, end="running", starts=self._starts)
            write_private(self._path, dumps(begun), durable=False)
        self._report = TuningReport("running", 0, 0.0)
        self._program = self._search()
        next(self._program)

    def install(self, undo: ExitStack) -> None:
        """Watch what DataLoaders do for a step, and how many steps an epoch has."""
        self._epochs.install(undo)
        self._reading.install(undo)

    def after_step(self) -> None:
        """Go on to the next step, under the levers that are compared now.

        The steps of a process that the script forks from this one, whose files and ranks are its
        parent's, are compared with none.
        """
        if self.done or os.getpid() != self._pid:
            return
        self._epochs.after_step()
        self._reading.after_step()
        try:
            next(self._program)
        except StopIteration:
            self.done = True
            end: End = "budget" if self._undecided() else "decided"
            self._write(replace(self._report, end=end, comparing=()))

    def finish(self) -> None:
        """Note that the script has ended, unless everything was decided before.

        Does nothing in forked processes.
        """
        if os.getpid() != self._pid:
            return
        if not self.done:
            self.done = True
            self._end_with_script()
        self._ranks.leave()

    def _end_with_script(self) -> None:
        if not self._continued.replaying:
            self._write(replace(self._report, end="script"))
        elif self._ranks.leads:  # what is known is in the file
            ended = replace(self._continued.earlier, end="script", starts=self._starts)
            write_private(self._path, dumps(ended), durable=False)

    def _search(self) -> Steps[None]:
        self._comparisons_left = NOISE_SHARE
        yield  # the first step, which creates what later ones find
        self._ranks.check_levers([*self._levers])
        plain: Levers = frozenset()
        yield from self._settle(plain, known=self._starts > 1)
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
        last = self._report.kept[-1:]  # it was compared beside all others
        if names := self._may_pay_together():
            self._comparisons_left = 1 + len(self._report.kept) + len(names)
            last = () if (yield from self._try_together(names)) else last
        yield from self._leave_out(spared=last)
        changed = frozenset(self._report.kept)
        # What is quoted later is the ratio to plain, also where one lever is left of several.
        if changed and not self._continued.timed(plain, changed):
            together = yield from self._compare(self._report.kept, plain, changed)
            # Where precision is changed under compilation, its first use compiles all once more.
            first_use_s = max(one.first_use_s for one in self._report.compared if one.kept)
            together = replace(together, first_use_s=first_use_s)
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

    def _may_pay_together(self) -> tuple[str, ...]:
        """Return levers that don't pay by themselves and may beside each other or what is kept.

        Of the levers that act on the model's calls each is compared before the next one is known.
        """
        left = [
            one
            for one in self._report.compared
            if one.verdict in ("slower", "same")
            and one.parity is not None
            and one.parity.right
            and getattr(self._levers[one.levers[0]], "around_step", None) is None
        ]
        first = list(self._levers).index
        names = tuple(one.levers[0] for one in left)
        last = max(map(first, self._report.kept), default=-1)
        new = len(names) > 1 or any(first(name) < last for name in names)
        dear = math.prod(one.ratio.middle for one in left) > MOST_TOGETHER
        return names if new and not dear else ()

    def _try_together(self, names: tuple[str, ...]) -> Steps[bool]:
        """Compare all that is kept with several levers and without; return if they are kept."""
        kept = frozenset(self._report.kept)
        found = yield from self._compare(names, kept, kept.union(names))
        if found.kept:
            compared = (
                tried_together(one, found, names) if one.levers[0] in names else one
                for one in self._report.compared
            )
            self._write(replace(self._report, compared=tuple(compared)))
        return found.kept

    def _leave_out(self, spared: tuple[str, ...]) -> Steps[None]:
        """Compare all that is kept without each lever but those that are spared."""
        for name in [name for name in self._report.kept if name not in spared]:
            kept = frozenset(self._report.kept)
            rest = " and ".join(other for other in self._report.kept if other != name)
            found = yield from self._compare((name,), kept - {name}, kept, known_right=True)
            compared = (
                beside(one, found, rest) if one.levers == (name,) else one
                for one in self._report.compared
            )
            self._write(replace(self._report, compared=tuple(compared)))

    def _compare(
        self, levers: tuple[str, ...], base: Levers, changed: Levers, *, known_right: bool = False
    ) -> Steps[Compared]:
        """Compare two sets of levers, unless an earlier start of the script has."""
        self._write(replace(self._report, comparing=levers))
        if (earlier := self._continued.compared()) is not None:
            self._comparisons_left -= 1
            return earlier
        found = yield from self._compare_now(levers, base, changed, known_right=known_right)
        self._continued.add(found)
        return found

    def _compare_now(
        self, levers: tuple[str, ...], base: Levers, changed: Levers, *, known_right: bool
    ) -> Steps[Compared]:
        """Compare two sets of levers until the faster one is known or its share of time is over."""
        begun = self._continued.begun
        found = Compared(levers, self._asked(levers), "undecided", Ratio(0.0, 1.0, UNBOUNDED))
        if self._late():
            return replace(found, reason=LATE)
        until_s, first_step = self._share(), self._meter.steps
        before = yield from self._settle(base, known=begun is not None)
        since = yield from self._settle(changed, known=begun is not None)
        if not any(since):  # no step was left for it
            return replace(found, reason=LATE)
        if idle := self._idle(levers):
            return replace(found, verdict="no effect", reason=idle)
        first_use_s = max(0.0, sum(since) - len(since) * statistics.median(since))
        parity = begun.parity if begun is not None else None
        if levers and not known_right and parity is None:
            parity = yield from self._parity(levers, changed)
            if parity.right is False:
                return replace(found, verdict="wrong", parity=parity, reason=wrong(parity))
        known = begun or replace(found, first_use_s=first_use_s if levers else 0.0, parity=parity)
        known = replace(known, steps=known.steps + self._meter.steps - first_step)
        self._continued.begin(known)
        length = block_steps([*before, *since])
        timed = yield from self._time(base, changed, length, until_s, known)
        kept, reason = judge(timed.verdict, parity, known_right=known_right)
        return replace(timed, kept=kept and bool(levers), reason=reason)

    def _time(
        self, base: Levers, changed: Levers, length: int, until_s: float, known: Compared
    ) -> Steps[Compared]:
        """Time pairs of blocks until the faster side is known or the time is over."""
        ratios, before = self._continued.pairs(base, changed), known.steps - self._meter.steps
        plain_s: list[float] = []
        changed_s: list[float] = []
        while ratios.verdict() == "undecided" and self._ranks.now_s() < until_s:
            without, with_it = yield from self._pair(base, changed, length)
            ratios.add(without, with_it)
            plain_s.append(without.wall_s)
            changed_s.append(with_it.wall_s)
            known = replace(
                known,
                steps=before + self._meter.steps,
                step_s=_median(changed_s),
                plain_step_s=_median(plain_s),
                peak_bytes=self._peak_bytes.get(changed, 0),
                plain_peak_bytes=self._peak_bytes.get(base, 0),
            )
            self._continued.begin(known)
            if self._ranks.leads:
                self._continued.save_now_and_then(self._report)
        return replace(known, verdict=ratios.verdict(), ratio=ratios.ratio(), pairs=len(ratios))

    def _asked(self, levers: tuple[str, ...]) -> str:
        return self._levers[levers[0]].recorder.asked if len(levers) == 1 else ""

    def _share(self) -> float:
        """Return until when the comparison that begins now may last."""
        now_s, spent_s = self._ranks.now_s(), self._continued.spent_s
        left_s = max(0.0, self._until_s - now_s) + spent_s
        share_s = left_s / max(1, self._comparisons_left) - spent_s
        self._comparisons_left -= 1
        return now_s + share_s

    def _late(self) -> bool:
        return self._ranks.now_s() >= self._until_s

    def _idle(self, levers: tuple[str, ...]) -> str:
        """Return why a lever that is switched on does nothing; empty if it does something."""
        found = (self._outcome(name) for name in levers)
        idle = (one.reason or one.state.value for one in found if one.state is not State.APPLIED)
        return self._ranks.reason(next(idle, ""))

    def _outcome(self, name: str) -> Outcome:
        lever = self._levers[name]
        lever.refresh()
        return lever.recorder.outcome()

    def _settle(self, on: Levers, *, known: bool = False) -> Steps[list[float]]:
        """Take steps until their times fall no more, and return these times, in seconds.

        They are those of the last time if nothing was switched since.

        Args:
            on: The levers to have on.
            known: Whether an earlier start of the script has compared under them. A few steps do
                then: what is left of a warm-up cancels out, and a start may have few steps.
        """
        if on == self._on == self._settled[0] and self._settled[1]:
            return self._settled[1]
        self._set(on)
        times: list[float] = []
        while not (self._late() or settled(times) or (known and len(times) >= KNOWN_STEPS)):
            (taken,) = self._ranks.times([(yield from self._timed(1))])
            times.append(taken.wall_s)
        self._settled = (on, times)
        return times or [0.0]

    def _pair(self, base: Levers, changed: Levers, length: int) -> Steps[tuple[StepTime, StepTime]]:
        """Return the times of a step without and with, from two blocks in random order."""
        first_changed = self._coin.random() < 0.5
        taken: list[StepTime] = []
        for side in (changed, base) if first_changed else (base, changed):
            self._set(side)
            yield  # what a switch costs once isn't timed
            taken.append((yield from self._timed(length)))
        taken = self._ranks.times(taken)
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
        module.reset_peak_memory_stats(device)
        began_s = time.perf_counter()
        for _ in range(steps):
            yield
        module.synchronize(device)
        wall_s = (time.perf_counter() - began_s) / steps
        peak_bytes = module.max_memory_allocated(device)
        self._peak_bytes[self._on] = max(self._peak_bytes.get(self._on, 0), peak_bytes)
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
        looks: list[list[Parity]] = []
        while (found := confirmed(looks, last=self._late())) is None:
            looks.append(self._ranks.findings((yield from self._own_parity(levers, changed))))
        return found

    def _own_parity(self, levers: tuple[str, ...], changed: Levers) -> Steps[Parity]:
        """Compare what this rank computes in one step."""
        plain: Levers = frozenset()
        self._set(plain)
        around_step = getattr(self._levers[levers[0]], "around_step", None)
        if around_step is not None:  # what else is on has no part in an optimizer's step
            with self._repeats.of_step(around_step, self._rounds[levers[0]]) as found:
                yield
            return found()
        rounds = max(self._rounds[it] for it in changed)
        with self._repeats.of_calls(rounds, eager="compile" not in changed) as compare:
            yield
        return compare(lambda: self._set(plain), lambda: self._set(changed))

    def _set(self, on: Levers) -> None:
        for name, lever in self._levers.items():
            if (name in on) != (name in self._on):
                lever.switch(on=name in on)
        if on != self._on:
            self._settled = (on, [])
        self._on = on

    def _write(self, report: TuningReport) -> None:
        earlier = self._continued.earlier
        self._report = replace(
            report,
            steps=earlier.steps + self._meter.steps,
            wall_s=earlier.wall_s + self._ranks.now_s(),
            starts=self._starts,
            epoch_steps=self._epochs.steps or earlier.epoch_steps,
            reading_s=self._reading.step_s or earlier.reading_s,
        )
        if self._ranks.leads and not self._continued.replaying:
            write_private(self._path, dumps(self._report), durable=False)
            self._continued.save(self._report)


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0
