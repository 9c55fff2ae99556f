"""Ranks under ``--compile auto``: they switch at the same steps, or stay eager, and never wait."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce

from fasttrain.files import load
from fasttrain.model.compile_auto import COMPILE_AUTO_FILE, Switched
from fasttrain.model.levers import Strategy
from fasttrain.model.outcome import State
from fasttrain.shim.compile_auto import auto, lever, switch
from fasttrain.shim.compile_auto.ranks import cut_off
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.hooks.dynamo import UserCompile
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.levers.compile import shadow
from fasttrain.shim.process import true_clock
from support.forked_ranks import on_ranks

PLAIN_S = 0.01
COMPILED_S = 0.7  # of a plain step
ENOUGH = 400  # steps, in which all is decided


class FakeLever:
    """In the place of the lever that compiles: knows what is on."""

    def __init__(self, _: Any, recorder: OutcomeRecorder, *__: Any, **___: Any) -> None:
        self.recorder, self.on, self.targets, self.compile_s = recorder, False, 0, 0.0
        self.on_compiling: list[Callable[[str], None]] = []

    def install(self, undo: ExitStack) -> None:
        pass

    def begin(self, roots: Any) -> None:
        self.targets = len(list(roots))

    def switch(self, *, on: bool) -> None:
        self.on = on

    def refresh(self) -> None:
        self.recorder.counts["graphs"] = self.targets

    def end(self) -> None:
        self.targets = 0


class FakeCopy:
    """In the place of the copy that compiles: ends after some looks."""

    def __init__(self, result: shadow.Result) -> None:
        self.looks, self.seconds, self._result = 30, 1.0, result

    def result(self) -> shadow.Result | None:
        self.looks -= 1
        return self._result if self.looks < 0 else None

    def kill(self) -> None:
        pass


class Loop:
    """The training loop of one rank, on a clock of its own; ranks meet in each step."""

    def __init__(self, ranks: Ranks, folder: Path, **options: Any) -> None:
        self.now_s, self.ranks, self.options = 0.0, ranks, options
        for clock in ("perf_counter", "process_time"):  # this is a process of its own
            setattr(time, clock, lambda: self.now_s)
        true_clock.perf_counter = lambda: self.now_s
        switch.CompileLever = FakeLever  # type: ignore[assignment,misc,attr-defined]
        result = shadow.Result(*options.get("copied", (1, 1.0, "")))
        shadow.begin = lambda *_: FakeCopy(result)  # type: ignore[assignment,return-value]
        auto.no_room_to_fork = lambda: ""
        dist.is_initialized = lambda: True
        os.environ |= {"WORLD_SIZE": str(ranks.world_size), "RANK": str(ranks.rank)}
        self.undo, self.final = ExitStack(), list[Callable[[], None]]()
        self.meter: Any = SimpleNamespace(
            capturing=False, steps=options.get("ahead", 0), device="", on_step=[], on_pass=[]
        )
        roots = RootCalls()
        self.shared: Any = SimpleNamespace(
            plan=self._plan(folder), roots=roots, meter=self.meter, child=False,
            user_compile=UserCompile(), lever_state=SimpleNamespace(ranks=ranks),
            on_compiling=[], on_final=self.final, event=lambda _: None,
        )  # fmt: skip
        self.recorder = OutcomeRecorder("compile", "auto", explicit=True)
        (self.auto,) = lever.build(self.shared, None, self.recorder)  # type: ignore[arg-type]
        roots.install(self.undo)
        self.auto.install(self.undo)
        self.net = nn.Linear(4, 4)

    def _plan(self, folder: Path) -> Any:
        strategy = SimpleNamespace(value=Strategy("script"))
        return SimpleNamespace(
            run_dir=str(folder), shared_dir="", strict=False, earlier=None, max_steps=10**8,
            compares=False,
            processes=SimpleNamespace(value=SimpleNamespace(backend="torchrun")),
            levers=SimpleNamespace(strategy=strategy),
        )  # fmt: skip

    @property
    def lever(self) -> Any:
        return self.auto.lever  # type: ignore[attr-defined]

    def step(self) -> bool:
        """Make a step, and return whether its call was compiled."""
        self.net(torch.ones(self.options.get("rows", 2), 4))
        on = bool(self.lever.on)
        ratio = self.options.get("ratio", COMPILED_S)
        self.now_s += PLAIN_S * (ratio if on else 1.0)
        self._meet()
        self.meter.steps += 1
        for listen in self.meter.on_step:
            listen(self.meter.steps)
        return on

    def _meet(self) -> None:
        """Wait for the other ranks, as for their gradients, unless they have ended."""
        number = self.meter.steps - self.options.get("ahead", 0)
        if number < self.options.get("together", 10**9):
            self.ranks.store.set(f"at/{number}/{self.ranks.rank}", "")
            for rank in range(self.ranks.world_size):
                self.ranks.store.get(f"at/{number}/{rank}")

    def run(self, steps: int = ENOUGH, act: Callable[[Loop], None] = lambda _: None) -> Any:
        """Return at which steps what is on has changed, and what became of it."""
        changes: list[int] = []
        on = False
        for _ in range(steps):
            act(self)
            before, on = on, self.step()
            if on != before:
                changes.append(self.meter.steps)
        for end in self.final:
            end()
        self.undo.close()
        return [changes, self.recorder.state, self.recorder.reason]


def run_loops(folder: Path, world_size: int = 2, **options: Any) -> list[Any]:
    """Return what `Loop.run` returns on each rank, with options of each: a list by rank."""

    def run(ranks: Ranks) -> Any:
        own = {name: value[ranks.rank] for name, value in options.items()}
        act = own.pop("act", lambda _: None)
        steps = own.pop("steps", ENOUGH)
        return Loop(ranks, folder, **own).run(steps, act)

    return [ended.good for ended in on_ranks(folder, run, world_size=world_size)]


def switched(folder: Path) -> Switched:
    return load(Switched, folder / COMPILE_AUTO_FILE)


def test_all_ranks_switch_at_the_same_steps(tmp_path: Path) -> None:
    first, second, third = run_loops(tmp_path, world_size=3)
    assert first == second == third
    changes, state, reason = first
    assert state == State.APPLIED
    assert len(changes) > 10, "blocks have taken turns"
    found = switched(tmp_path)
    assert found.phase == "kept"
    assert f"compiled from step {found.from_step:,} on: 10 -> 7 ms" in reason
    assert changes[0] == found.from_step + 1
    assert len(changes) % 2 == 1, "it stays on"


def test_what_is_slower_is_dropped_by_all_at_the_same_step(tmp_path: Path) -> None:
    first, second = run_loops(tmp_path, ratio=[1.2, 1.2])
    assert first == second
    changes, state, reason = first
    assert (state, len(changes) % 2) == (State.SKIPPED, 0)
    assert "20 % slower (10 -> 12 ms a step)" in reason
    assert switched(tmp_path).phase == "dropped"


def stayed(both: list[Any], *words: str) -> None:
    for changes, state, reason in both:
        assert (changes, state) == ([], State.SKIPPED), reason
        for word in words:
            assert word in reason


def test_ranks_with_other_shapes_stay_eager(tmp_path: Path) -> None:
    stayed(run_loops(tmp_path, rows=[2, 3], steps=[200, 200]), "rank 1 calls", "other shapes")


def test_a_copy_that_fails_leaves_all_ranks_eager(tmp_path: Path) -> None:
    copied = [(0, 1.0, "it ended before it had compiled anything (signal 9)")] * 2
    stayed(run_loops(tmp_path, copied=copied), "signal 9")


def test_a_rank_that_can_not_compile_is_named(tmp_path: Path) -> None:
    def compiles_itself(loop: Loop) -> None:
        loop.shared.user_compile.what, loop.shared.user_compile.where = "net", "train.py:3"

    quiet: Callable[[Loop], None] = lambda _: None  # noqa: E731
    first, second = run_loops(tmp_path, act=[quiet, compiles_itself], steps=[200, 200])
    assert first[:2] == [[], State.SKIPPED]
    assert "on rank 1: the script compiles net itself (train.py:3)" in first[2]
    assert second[:2] == [[], State.CEDED]


@pytest.mark.parametrize("steps", [(60, 300), (300, 60)], ids=["rank 0", "rank 1"])
def test_nobody_waits_for_a_rank_that_has_ended(tmp_path: Path, steps: tuple[int, int]) -> None:
    together = min(steps)
    both = run_loops(tmp_path, steps=list(steps), together=[together, together])
    ended, other = sorted(both, key=lambda one: bool(one[0]))
    assert ended[0] == []
    assert bool(other[0]) is (steps[0] > steps[1]), "rank 0 goes on alone, and nobody for rank 0"


def test_a_rank_that_makes_few_steps_is_waited_for_in_vain(tmp_path: Path) -> None:
    first, _ = run_loops(tmp_path, steps=[300, 15], together=[15, 15])
    assert first[:2] == [[], State.SKIPPED]
    assert "not all ranks had made enough" in first[2]


def test_ranks_whose_steps_are_others_stay_eager(tmp_path: Path) -> None:
    first, second = run_loops(tmp_path, ahead=[0, 50])
    for changes, state, reason in (first, second):
        assert state == State.SKIPPED
        assert changes == []
        assert "it was to change at step" in reason


def test_a_rank_that_compiles_again_and_again_ends_it_for_all(tmp_path: Path) -> None:
    def recompiles(loop: Loop) -> None:
        if loop.meter.steps in (400, 402, 404):
            for listen in loop.lever.on_compiling:
                listen("Linear")

    quiet: Callable[[Loop], None] = lambda _: None  # noqa: E731
    first, second = run_loops(tmp_path, act=[quiet, recompiles], steps=[820, 820])
    assert first[0] == second[0]
    assert first[0][-1] > 404
    assert first[1] == second[1] == State.SKIPPED
    assert "compiled again and again" in first[2]


@contextmanager
def gloo(ranks: Ranks) -> Iterator[None]:
    dist.init_process_group("gloo", store=ranks.store, rank=ranks.rank, world_size=ranks.world_size)
    yield
    dist.destroy_process_group()


def test_a_copy_reaches_no_other_rank(tmp_path: Path) -> None:
    """Without it the collectives of a forked process wait for threads that it hasn't."""

    def in_copy(ranks: Ranks) -> list[str]:
        reads, writes = os.pipe()
        if not os.fork():
            said = []
            with cut_off():
                tries = [
                    lambda: dist.all_reduce(torch.ones(2)),
                    lambda: all_reduce(torch.ones(2), "sum", dist.group.WORLD),
                    lambda: dist.broadcast(torch.ones(2), 0),
                    dist.barrier,
                    lambda: torch.ops.fasttrain.total(torch.ones(2), False),
                ]
                for attempt in tries:
                    try:
                        said.append(str(attempt().tolist()))
                    except Exception as error:  # noqa: BLE001
                        said.append(str(error))
            os.write(writes, json.dumps(said).encode())
            os._exit(0)
        os.close(writes)
        with os.fdopen(reads) as pipe:
            said = json.loads(pipe.read())
        os.wait()
        return said

    def run(ranks: Ranks) -> Any:
        with gloo(ranks):
            said = in_copy(ranks) if ranks.rank == 0 else []
            total = torch.ones(2)
            dist.all_reduce(total)  # the group itself still works
            return [said, total.tolist()]

    first, second = on_ranks(tmp_path, run)
    said, total = first.good
    assert said == ["it communicates with other ranks"] * 4 + ["[1.0, 1.0]"]
    assert total == second.good[1] == [2.0, 2.0]
