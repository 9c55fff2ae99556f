"""``--compile auto``: trains eagerly, compiles in the background, and keeps what is faster.

What happens next is written down as a generator, `AutoCompile._decide`, which is resumed after
each step, as in `tune.tuner`. `rule` decides when to begin, by what `outlook` knows;
`background` compiles, and pairs of blocks decide whether the compiled model stays. Of
several ranks one decides (`ranks`), and the others do the same at the same steps
(`follower`).
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import torch
from torch.nn import Module

from fasttrain.model.compile_auto import Switched
from fasttrain.model.decision import Decision
from fasttrain.model.levers import Compile
from fasttrain.model.vendors import LIKE_CUDA
from fasttrain.shim.compile_auto.background import SHARE, Background, counted
from fasttrain.shim.compile_auto.foreground import TimeBox, no_room_on
from fasttrain.shim.compile_auto.outlook import CACHE_FOLDER, Outlook
from fasttrain.shim.compile_auto.peers import Others, Ready, Steps
from fasttrain.shim.compile_auto.rule import Choice
from fasttrain.shim.compile_auto.switch import NO_GRAPH, SwitchedProcess
from fasttrain.shim.hooks.device_clock import module_of
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder, Shared
from fasttrain.statistics.paired import SAME, PairedClocks, StepTime, block_steps, settled

LOOK_EVERY = 10  # steps, while it is too early to begin
ALPHA = 0.05
MOST_PAIRS = 60  # of blocks, after which the faster side is taken as it looks
# What the background may take from the training, as a multiple of what was expected.
MOST_OVER = 2.0


class AutoCompile(SwitchedProcess):
    """Compiles roots when that pays, in this process or in all ranks.

    Args:
        shared: What the levers share.
        decision: What was decided: how to compile.
        recorder: Records what becomes of it.
        others: The other ranks, which do what this one says.
    """

    def __init__(
        self,
        shared: Shared,
        decision: Decision[Compile],
        recorder: OutcomeRecorder,
        others: Others,
    ) -> None:
        super().__init__(shared, decision, recorder, others)
        self._others = others
        self._outlook = Outlook(shared, self._clock)
        self._background = Background(self._heard, self.lever, self._clock, self._note, others)
        self._parts = 0  # modules without any inside

    def install(self, undo: ExitStack) -> None:
        """Watch the calls of roots, the steps, and the batches."""
        super().install(undo)
        if not self._shared.child:
            self._outlook.install(undo)
            self._background.install(undo)

    def _watch(self) -> Steps[float]:
        self._outlook.begin()
        return (yield from super()._watch())

    def _end_background(self) -> None:
        self._background.kill()

    def _decide(self, plain_s: float, ready: Ready) -> Steps[None]:
        """Compile if that pays, and keep what is faster."""
        why = yield from self._others.agree(ready)
        if why:
            self._stay(why)
            return
        self._others.pace(plain_s)
        yield from self._others.meet("watched")
        self._parts = self._count_parts()
        choice = yield from self._wait(plain_s)
        if choice.verdict == "never":
            self._stay(choice.why)
            return
        why = self._others.objection()
        if self._others.several and not self._on_cpu():
            why = "nothing compiles in the background on this device"
        if why:
            self._stay(why)
            return
        if self._on_cpu():
            if not (yield from self._compile_apart(plain_s)):
                return
        elif why := no_room_on(self._devices()):
            self._stay(why)
            return
        times = yield from self._switch(plain_s)
        if times and (yield from self._compare(times)):
            yield from self._go_on()

    def _wait(self, plain_s: float) -> Steps[Choice]:
        """Wait until it is clear whether to compile."""
        while True:
            forks = self._on_cpu()
            prospect = self._outlook.prospect(plain_s, self._parts, forks=forks)
            choice = self._outlook.decide(prospect, tries=forks or self._tries())
            if choice.verdict != "wait":
                self._note("decided", {**asdict(prospect), **asdict(choice)})
                return choice
            self._set(
                replace(self._found, reason=f"the run ended before it could pay: {choice.why}")
            )
            yield LOOK_EVERY

    def _on_cpu(self) -> bool:
        return all(root.device == "cpu" for root in self._forms) and not _has_device()

    def _count_parts(self) -> int:
        modules = [module for root in self._forms if (module := root.ref()) is not None]
        return sum(
            not any(True for _ in m.children()) for one in modules for m in Module.modules(one)
        )

    def _compile_apart(self, plain_s: float) -> Steps[bool]:
        """Compile in the background; return False if nothing could be."""
        if why := self._background.why_not():
            self._stay(why)
            return False
        self._set(Switched("compiling", "the run ended while it compiled in the background"))
        allowed_s = self._allowed_s(plain_s, forks=True)
        failed = yield from self._background.compile(self._forms, plain_s, allowed_s)
        self._found = replace(
            self._found,
            background_s=self._background.seconds,
            slowed_s=self._background.slowed_s,
        )
        if not self._forms:
            self._stay(failed)
        elif failed:
            self.recorder.note(f"runs eagerly: {failed}")
        return bool(self._forms)

    def _allowed_s(self, plain_s: float, *, forks: bool) -> float:
        """Return the seconds after which a compilation is ended."""
        prospect = self._outlook.prospect(plain_s, self._parts, forks=forks)
        # What rests on a cache alone, which may have lost the graphs, is ended at what it was to
        # cost: it is the part of the run that a compilation in vain may take.
        over = 1.0 if self._outlook.warm else MOST_OVER
        return max(over * prospect.cost_s, SHARE * prospect.known_s)

    def _tries(self) -> bool:
        """True if the training may wait for a compilation that nobody has shown to pay."""
        # Under --strict an error of the compiler is the script's, the one that ends it as well.
        kinds = {device.type for device in self._devices()}
        return kinds <= {"cpu", "cuda"} and not self._shared.plan.strict

    def _devices(self) -> set[torch.device]:
        modules = [module for root in self._forms if (module := root.ref()) is not None]
        return {one.device for module in modules for one in Module.parameters(module)}

    def _switch(self, plain_s: float) -> Steps[list[float]]:
        """Run compiled from the next step on; return the times of the first steps."""
        if why := self._why_not() or self._others.objection():
            self._stay(why)
            return []
        compiled = [at for at, root in enumerate(self._named) if root in self._forms]
        yield from self._others.meet("switched", roots=compiled)
        self._begin_comparing(plain_s)
        if not self._begin():
            return []
        with self._time_box(plain_s) as box:
            times = yield from self._first_times(box)
        if not times:
            return []
        cached = not counted("fxgraph_cache_miss")
        self._found = replace(
            self._found,
            stall_s=max(0.0, sum(times) - len(times) * median(times)),
            cached=cached,
            cache=os.environ.get(CACHE_FOLDER, "") if cached else "",
        )
        self.lever.refresh()
        if self._found.background_s and not cached:
            self.recorder.note("not all that was compiled in the background was found in the cache")
        if not self.recorder.counts["graphs"]:
            yield from self._drop_together(NO_GRAPH)
            return []
        return times

    @contextmanager
    def _time_box(self, plain_s: float) -> Iterator[TimeBox | None]:
        """Have compilations ended that take too long, where the training waits for them."""
        if self._on_cpu() or self._shared.plan.strict:  # then an error of theirs is the script's
            yield None
            return
        box = TimeBox(self._allowed_s(plain_s, forks=False))
        with ExitStack() as undo:
            box.install(self.lever.on_compiling, undo)
            yield box

    def _first_times(self, box: TimeBox | None) -> Steps[list[float]]:
        """Return the times of compiled steps until they are settled; none if it took too long."""
        times: list[float] = []
        while not settled(times):
            yield 1
            times.append(self._clock.taken_s)
            self._has_switched = True  # what is compiled from now on wasn't foreseen
            if box is not None and box.over:
                yield from self._drop_together(f"compiling took more than {box.allowed_s:.1f} s")
                return []
        return times

    def _compare(self, times: list[float]) -> Steps[bool]:
        """Compare blocks of compiled steps with plain ones; return True if they are kept."""
        ratios, length = PairedClocks(ALPHA), block_steps(times)
        coin = random.Random(0)  # noqa: S311 - an order of blocks, no secret
        plain_s: list[float] = []
        while ratios.verdict() == "undecided" and len(ratios) < MOST_PAIRS:
            firsts = [coin.random() < 0.5 for _ in range(self._others.pairs_at_once)]
            sides = [side for first in firsts for side in (first, not first)]
            yield from self._others.meet("pairs", sides=sides, each=1 + length)
            for first in firsts:
                plain, compiled = yield from self._pair(first, length)
                if self._found.phase == "dropped":
                    return False
                ratios.add(plain, compiled)
                plain_s.append(plain.wall_s)
            if why := self._others.objection():
                yield from self._drop_together(why)
                return False
        middle, verdict = ratios.ratio().middle, ratios.verdict()
        self._found = replace(
            self._found,
            plain_step_s=median(plain_s),
            # By the ratio of neighbours, to which the load of the machine does least.
            compiled_step_s=median(plain_s) * middle,
            undecided=verdict == "undecided",
        )
        self._note("compared", {"pairs": len(ratios), "verdict": verdict, "ratio": middle})
        if verdict == "faster" or (verdict == "undecided" and middle < 1.0 - SAME):
            reason = self._why_kept()
            yield from self._others.meet("kept", reason)
            self._keep(reason)
            return True
        percent = 100.0 * abs(middle - 1.0)
        slower = f"{percent:.0f} % slower" if middle > 1.0 + SAME else "not faster"
        yield from self._drop_together(f"{slower} ({self._step_times()}); {self._costs()}")
        return False

    def _pair(self, first: bool, length: int) -> Steps[tuple[StepTime, StepTime]]:
        """Return the times of a plain step and of a compiled one, from two blocks of steps."""
        pair: dict[bool, StepTime] = {}
        for side in (first, not first):
            self._on = side
            yield 1  # what a switch costs once isn't timed
            pair[side] = yield from self._timed(length)
        return pair[False], pair[True]

    def _drop_together(self, why: str) -> Steps[None]:
        """Have all ranks run eagerly from the same step on."""
        yield from self._others.meet("dropped", why)
        self._drop(why)

    def _go_on(self) -> Steps[None]:
        """Run compiled until a rank objects."""
        while self._others.several:
            yield self._others.every
            if why := self._others.objection():
                yield from self._drop_together(why)
                return

    def _timed(self, steps: int) -> Steps[StepTime]:
        device = torch.device(self._meter.device or "cpu")
        module = module_of(device)
        if module is not None:
            module.synchronize(device)
        wall_s, processor_s = list[float](), list[float]()
        for _ in range(steps):
            began_s, used_s = time.perf_counter(), time.process_time()
            yield 1
            if module is not None:
                module.synchronize(device)
            wall_s.append(time.perf_counter() - began_s)
            processor_s.append(time.process_time() - used_s)
        wall = sorted(wall_s)[(steps - 1) // 2]
        return StepTime(wall, wall if module else sorted(processor_s)[(steps - 1) // 2])

    def _why_kept(self) -> str:
        found = self._found
        gain_s = found.plain_step_s - found.compiled_step_s
        cost_s = found.stall_s + found.slowed_s
        paid = f", paid after {math.ceil(cost_s / gain_s):,} steps" if gain_s > 0 else ""
        return (
            f"compiled from step {found.from_step:,} on: {self._step_times()},"
            f" {self._costs()}{paid}"
        )

    def _step_times(self) -> str:
        return f"{_ms(self._found.plain_step_s)} -> {_ms(self._found.compiled_step_s)} ms a step"

    def _costs(self) -> str:
        found = self._found
        parts = [f"{found.background_s:.0f} s in the background"] if found.background_s else []
        if found.slowed_s >= 0.1:
            parts.append(f"steps meanwhile {found.slowed_s:.1f} s slower")
        return ", ".join([*parts, f"{found.stall_s:.1f} s stall at the switch"])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 0.9995 else f"{1e3 * seconds:.0f}"


def _has_device() -> bool:
    """True if this process uses a device, so that it can't be forked."""
    modules: list[Any] = [getattr(torch, name, None) for name in LIKE_CUDA]
    return any(m.is_initialized() for m in modules if hasattr(m, "is_initialized"))
