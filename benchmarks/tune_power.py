"""How often `fasttrain tune` decides rightly whether a change of 5 % makes steps faster.

A small training loop takes real steps on one thread, while a process beside it, on the last core,
computes in bursts of random length. Of the recorded times of its steps each tune takes a stretch of
its own, and the times of blocks that have the change are multiplied by 1.05, by 1 / 1.05, or by 1.
Several rules judge the same stretch: ours until it decides, then the others by as many steps as
ours took in that tune, and by all steps of the budget. Where stretches overlap, the tunes of A/A
are still independent: given the times, ours is wrong only by the coins of each tune. Then a few
tunes run live: there the change is arithmetic that really takes 5 % of a step, added to the blocks
that have the change or left out of them.

The constants of `fasttrain.statistics.paired` were chosen by recordings of 6,600 steps on two
cores that other programs kept busy, too: half of the steps took 14.4 ms or more of wall time and
6.6 ms of processor time. Of 100 changes of 5 % within 2,000 steps, by one clock alone:

- Blocks have 2 timed steps, and their time is the lower median. By wall time that decides 92, the
  same of 4 steps 86, of 6 steps 65; the mean of 2 steps decides 48, that of 3 steps 40. By
  processor time all of these decide 98 or more, after 300, 450, 630, 290 and 390 steps.
- PRIOR: 1, 3 and 10 decide 90, 92 and 94 by wall time; by processor time 3 is the quickest.
- MIN_BLOCK_S: steps of 0.4 ms are decided after 1,500 steps in blocks of 4, after 1,900 in blocks
  of 10, 3,400 in blocks of 25, 6,300 in blocks of 50, and rarely in blocks of 100. So a block is as
  short as a switch, and the queue of a GPU that runs empty after each block, allow.
- At alpha 0.02 of a verdict more than 5 wrong ones in 100 are hardly ever seen. Each clock has half
  of it. tune shares 0.05 among the comparisons of all its levers: 0.0083 for each of two levers,
  which is what is judged by here (`--levers`).

    python benchmarks/tune_power.py
    python benchmarks/tune_power.py --quick                # a smoke test
    python benchmarks/tune_power.py --trace FILE --live 0  # keep the recording, or judge it again
"""

import argparse
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tables import print_heading, print_table

from fasttrain.model.tuning import Verdict
from fasttrain.statistics.paired import (
    PairedClocks,
    PairedRatios,
    StepTime,
    block_steps,
    block_time,
    settled,
    share,
)

PLANTED = 1.05
FLOOR = 0.03
BURSTS_S = (0.005, 1.0)  # shortest and longest burst and pause
COPIED_BYTES = 1 << 23  # more than the caches of a core hold
FACTORS = {"+5 %": PLANTED, "-5 %": 1.0 / PLANTED, "A/A": 1.0}
RIGHT: dict[str, tuple[Verdict, ...]] = {
    "+5 %": ("slower",),
    "-5 %": ("faster",),
    "A/A": ("same", "undecided"),
}
HEAD: tuple[str, ...] = (
    "rule",
    "tunes",
    "right at +5 %",
    "right at -5 %",
    "winner in A/A",
    "same in A/A",
    "steps at 5 %",
    "steps in A/A",
)
RECENT_STEPS = 20
CALIBRATED_STEPS = 100
WARM_UP_S = 2.0  # within it the load starts, too

# Takes a step, plain or with the change, and returns its time.
Step = Callable[[bool], StepTime]
PLAIN, CHANGED = False, True


@dataclass(frozen=True)
class Budget:
    """The most that one tune may take, and the alpha of its verdict."""

    steps: int
    time_s: float
    alpha: float


@dataclass(frozen=True)
class Judgement:
    """What a rule says, and after how many steps."""

    verdict: Verdict
    steps: int


class OutOfBudgetError(Exception):
    """No further step may be taken."""


class Meter:
    """Counts and times the steps that a rule takes, and ends it with its budget."""

    def __init__(self, take: Step, budget: Budget) -> None:
        self.steps = 0
        self._take = take
        self._most = budget.steps
        self._left_s = budget.time_s

    def __call__(self, changed: bool) -> StepTime:
        if self.steps >= self._most or self._left_s <= 0.0:
            raise OutOfBudgetError
        taken = self._take(changed)
        self.steps += 1
        self._left_s -= taken.wall_s
        return taken


def ours(take: Step, budget: Budget, coin: random.Random, *, wall_only: bool = False) -> Judgement:
    """Judge as `fasttrain tune` does: pairs of blocks in random order, until they decide."""
    step = Meter(take, budget)
    clocks, wall = PairedClocks(budget.alpha), PairedRatios(budget.alpha)
    judge = wall if wall_only else clocks
    try:
        recent_s: list[float] = []
        while not settled(recent_s):
            recent_s.append(step(PLAIN).wall_s)
        while judge.verdict() == "undecided":
            timed = block_steps(recent_s[-RECENT_STEPS:])
            first = coin.random() < 0.5
            blocks: dict[bool, StepTime] = {}
            for side in (first, not first):
                step(side)  # the first step of a block isn't timed
                steps = [step(side) for _ in range(timed)]
                blocks[side] = block_time(steps)
                recent_s += [one.wall_s for one in steps]
            wall.add(blocks[PLAIN].wall_s, blocks[CHANGED].wall_s)
            clocks.add(blocks[PLAIN], blocks[CHANGED])
    except OutOfBudgetError:
        pass
    return Judgement(judge.verdict(), step.steps)


def three_chunks(take: Step, steps: int) -> Verdict:
    """Judge by the medians of three chunks each, one after the other, and a floor of 3 %."""
    chunks = [[_mean_s(take, side, steps // 6) for _ in range(3)] for side in (PLAIN, CHANGED)]
    return _beyond(FLOOR, *map(median, chunks))


def two_means(take: Step, steps: int, floor: float) -> Verdict:
    """Judge by two means, one after the other."""
    return _beyond(floor, *(_mean_s(take, side, steps // 2) for side in (PLAIN, CHANGED)))


def _mean_s(take: Step, side: bool, steps: int) -> float:
    return fmean(take(side).wall_s for _ in range(steps))


def _beyond(floor: float, plain_s: float, changed_s: float) -> Verdict:
    if abs(changed_s / plain_s - 1.0) <= floor:
        return "same"
    return "faster" if changed_s < plain_s else "slower"


OTHERS: dict[str, Callable[[Step, int], Verdict]] = {
    "median of 3 chunks, 3 % floor": three_chunks,
    "two means back to back, 3 % floor": partial(two_means, floor=FLOOR),
    "two means back to back, no floor": partial(two_means, floor=0.0),
}


def replay(recorded: Sequence[StepTime], factor: float) -> Step:
    """Return recorded steps, whose times the change multiplies."""
    times = iter(recorded)

    def take(changed: bool) -> StepTime:
        one = next(times)
        if not changed:
            return one
        return StepTime(factor * one.wall_s, factor * one.processor_s)

    return take


# The loop and the load


class Loop:
    """A small training loop on one thread, with work of a known length that can be planted."""

    def __init__(self, seed: int, batch: int) -> None:
        import torch

        torch.manual_seed(seed)
        torch.set_num_threads(1)
        nn = torch.nn
        self._model = nn.Sequential(
            nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._inputs, self._labels = torch.randn(batch, 256), torch.randint(10, (batch,))
        self._product: Callable[[], Any] = partial(
            torch.mm, torch.randn(64, 64), torch.randn(64, 64), out=torch.empty(64, 64)
        )
        self._loss = nn.functional.cross_entropy

    def step(self, products: int = 0) -> StepTime:
        """Take a step and some matrix products, and return its time."""
        began_s, processor_s = time.perf_counter(), time.process_time()
        self._optimizer.zero_grad()
        self._loss(self._model(self._inputs), self._labels).backward()
        self._optimizer.step()
        for _ in range(products):
            self._product()
        return StepTime(time.perf_counter() - began_s, time.process_time() - processor_s)

    def products(self, share: float) -> int:
        """Return how many products take this share of a step."""
        most = 200
        pairs = [(self.step(), self.step(most)) for _ in range(CALIBRATED_STEPS)]
        plain_s, more_s = (
            median(one.processor_s for one in side) for side in zip(*pairs, strict=True)
        )
        return max(1, round(share * plain_s * most / (more_s - plain_s)))


def planted(loop: Loop, factor: float, products: int) -> Step:
    """Return live steps: the change adds the products, leaves them out, or does nothing."""
    if factor > 1.0:
        return lambda changed: loop.step(products if changed else 0)
    if factor < 1.0:
        return lambda changed: loop.step(0 if changed else products)
    return lambda _: loop.step()


def compute_in_bursts(seed: int, parent: int) -> None:
    """Compute in bursts, arithmetic or memory traffic, until the parent ends."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    chance = random.Random(seed)
    data = bytes(COPIED_BYTES)

    def length_s() -> float:
        return math.exp(chance.uniform(*map(math.log, BURSTS_S)))

    while os.getppid() == parent:
        copies = chance.random() < 0.5
        until_s = time.perf_counter() + length_s()
        while time.perf_counter() < until_s:
            _ = bytearray(data) if copies else sum(range(10_000))
        time.sleep(length_s())


@contextmanager
def random_load(seed: int) -> Iterator[None]:
    """Let a child process compute in bursts on the last core."""
    child = get_context("spawn").Process(
        target=compute_in_bursts, args=(seed, os.getpid()), daemon=True
    )
    child.start()
    try:
        yield
    finally:
        child.terminate()
        child.join()


def record(loop: Loop, record_s: float) -> list[StepTime]:
    """Return the times of real steps."""
    until_s = time.perf_counter() + record_s
    times = []
    while time.perf_counter() < until_s:
        times.append(loop.step())
    return times


def read(trace: Path) -> list[StepTime]:
    """Return recorded times."""
    return [StepTime(*one) for one in json.loads(trace.read_text(encoding="utf-8"))]


def write(trace: Path, recorded: Sequence[StepTime]) -> None:
    """Keep recorded times."""
    pairs = [(one.wall_s, one.processor_s) for one in recorded]
    trace.write_text(json.dumps(pairs), encoding="utf-8")


# The tables


Judged = dict[str, dict[str, list[Judgement]]]  # by rule and by planted change


def judge_recorded(recorded: Sequence[StepTime], budget: Budget, tunes: int, seed: int) -> Judged:
    """Return the judgements of each rule.

    Raises:
        SystemExit: If the recording is shorter than the budget of one tune.
    """
    last = len(recorded) - budget.steps
    if last < 0:
        raise SystemExit(f"{len(recorded)} steps were recorded, fewer than --steps")
    found: Judged = {}
    for change, factor in FACTORS.items():
        for tune in range(tunes):
            begin = last * tune // max(1, tunes - 1)
            stretch = partial(replay, recorded[begin : begin + budget.steps], factor)
            for name, one in judge_stretch(stretch, budget, f"{seed} {change} {tune}").items():
                found.setdefault(name, {c: [] for c in FACTORS})[change].append(one)
    return found


def judge_stretch(stretch: Callable[[], Step], budget: Budget, seed: str) -> dict[str, Judgement]:
    """Return the judgements of all rules on one stretch of recorded steps."""
    by_clocks = ours(stretch(), budget, random.Random(seed))
    by_wall = ours(stretch(), budget, random.Random(seed), wall_only=True)
    judged = {"ours": by_clocks, "ours by wall time alone": by_wall}
    for extent, steps in (("as many steps", by_clocks.steps), ("whole budget", budget.steps)):
        for name, rule in OTHERS.items():
            judged[f"{name}, {extent}"] = Judgement(rule(stretch(), steps), steps)
    return judged


def judge_live(loop: Loop, budget: Budget, tunes: int, seed: int) -> Judged:
    """Return the judgements of our rule for changes that are really made."""
    products = loop.products(PLANTED - 1.0)
    print(f"live: {products} products of 64 x 64 matrices take 5 % of a step")
    found: dict[str, list[Judgement]] = {change: [] for change in FACTORS}
    for tune in range(tunes):
        for change, factor in FACTORS.items():
            coin = random.Random(f"{seed} live {change} {tune}")
            found[change].append(ours(planted(loop, factor, products), budget, coin))
    return {"ours, live": found}


def print_judgements(found: Judged) -> None:
    """Print a line for each rule."""
    if not found:
        return
    rows = [HEAD]
    for name, judged in found.items():
        right = {c: sum(one.verdict in RIGHT[c] for one in all_) for c, all_ in judged.items()}
        tunes = len(judged["A/A"])
        at_5 = [one.steps for change in ("+5 %", "-5 %") for one in judged[change]]
        rows.append((
            *(name, str(tunes), str(right["+5 %"]), str(right["-5 %"]), str(tunes - right["A/A"])),
            str(sum(one.verdict == "same" for one in judged["A/A"])),
            *(f"{median(steps):.0f}" for steps in (at_5, [j.steps for j in judged["A/A"]])),
        ))  # fmt: skip
    print_table(rows)
    print()


def print_noise(recorded: Sequence[StepTime]) -> None:
    """Print how much the recorded times scatter."""
    print(f"recorded: {len(recorded)} steps, milliseconds by share of the steps that are shorter\n")
    rows: list[tuple[str, ...]] = [("clock", "10 %", "50 %", "90 %")]
    for clock in ("wall_s", "processor_s"):
        ascending = sorted(getattr(one, clock) for one in recorded)
        shown = (f"{1e3 * ascending[len(ascending) * n // 10]:.1f}" for n in (1, 5, 9))
        rows.append((clock.removesuffix("_s"), *shown))
    print_table(rows)
    print()


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=2000, help="budget of a tune in steps")
    parser.add_argument("--time-s", type=float, default=30.0, help="budget of a tune in seconds")
    parser.add_argument("--levers", type=int, default=2, help="levers that share alpha")
    parser.add_argument("--tunes", type=int, default=100, help="tunes of each kind, recorded")
    parser.add_argument("--live", type=int, default=3, help="tunes of each kind, live")
    parser.add_argument("--record-s", type=float, default=120.0, help="seconds to record")
    parser.add_argument("--batch", type=int, default=48, help="samples per step")
    parser.add_argument("--trace", type=Path, help="read recorded times, or record and keep them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a smoke test of half a minute")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.tunes, args.live, args.record_s = 300, 20, 1, 8.0
    return args


def main() -> None:
    """Record, judge, and print the tables."""
    args = parse_args()
    print_heading()
    budget = Budget(args.steps, args.time_s, share(args.levers))
    recorded = read(args.trace) if args.trace is not None and args.trace.exists() else []
    live: Judged = {}
    if not recorded or args.live:
        with random_load(args.seed):
            loop = Loop(args.seed, args.batch)
            record(loop, WARM_UP_S)
            recorded = recorded or record(loop, args.record_s)
            live = judge_live(loop, budget, args.live, args.seed) if args.live else {}
    if args.trace is not None:
        write(args.trace, recorded)
    print_noise(recorded)
    print_judgements(live)
    print_judgements(judge_recorded(recorded, budget, args.tunes, args.seed))


if __name__ == "__main__":
    main()
