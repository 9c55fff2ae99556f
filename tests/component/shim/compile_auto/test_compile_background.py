"""When a compilation in the background is given up, and what is known of the rest of a run."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from fasttrain.model.compile_auto import Earlier
from fasttrain.shim.compile_auto import background
from fasttrain.shim.compile_auto import outlook as outlook_module
from fasttrain.shim.compile_auto.background import MOST_TIMES, Background, no_room_to_fork
from fasttrain.shim.compile_auto.calls import WATCHED_STEPS, CallsOfOne
from fasttrain.shim.compile_auto.outlook import Outlook, StepClock
from fasttrain.shim.compile_auto.peers import NoOthers
from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.levers.compile import confined, shadow
from fasttrain.shim.levers.compile.repetitions import form_of
from fasttrain.shim.levers.compile.shadow import Result

PLAIN_S = 0.01
ALLOWED_S = 0.5
BATCH = torch.randn(4, 2)


class Copy:
    """In the place of a copy of the process: compiles for some steps."""

    def __init__(self, polls: int = 10**9, seconds: float = 1.0) -> None:
        self.polls, self.seconds, self.killed = polls, seconds, False

    def result(self) -> Result | None:
        self.polls -= 1
        return Result(1, self.seconds) if self.polls < 0 else None

    def kill(self) -> None:
        self.killed = True


class Run:
    """A model that is called at each step while it is compiled in the background."""

    def __init__(self) -> None:
        self.net, self.roots, self.clock = nn.Linear(2, 2), RootCalls(), StepClock()
        self.clock.first_s = 1e12  # nothing was trained so far
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.told: list[str] = []
        recorder = SimpleNamespace(note=self.told.append)
        lever: Any = SimpleNamespace(recorder=recorder)
        note: Any = lambda what, data: self.notes.append((what, data))  # noqa: E731
        self.background = Background(CallsOfOne(self.roots), lever, self.clock, note, NoOthers())
        root = self.roots._root_of(self.net)
        assert root is not None
        self.forms = {root: form_of(self.net, (BATCH,), {})}

    def compile(self, step_s: float = PLAIN_S, batch: torch.Tensor = BATCH) -> str:
        """Train until it is over, and return why it failed."""
        program = self.background.compile(self.forms, PLAIN_S, ALLOWED_S)
        (root,) = self.forms
        try:
            next(program)
            for _ in range(10_000):
                for listen in self.roots.on_call:
                    listen(root, (batch,), {})
                self.clock.taken_s = step_s
                next(program)
        except StopIteration as end:
            return str(end.value)
        raise AssertionError("it doesn't end")


@pytest.fixture
def copy(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(made: Copy) -> Copy:
        monkeypatch.setattr(shadow, "begin", lambda *_: made)
        return made

    return use


def test_one_that_compiles_is_waited_for(copy: Any) -> None:
    copy(Copy(polls=20))
    run = Run()
    assert run.compile(1.1 * PLAIN_S) == ""
    assert len(run.forms) == 1
    assert run.background.slowed_s == pytest.approx(20 * 0.1 * PLAIN_S)
    assert run.roots.on_call == []
    ((what, data),) = run.notes
    assert (what, data["graphs"]) == ("compiled", 1)


@pytest.mark.parametrize("number", [0, errno.ENOSYS, errno.EPERM])
def test_a_copy_that_can_write_is_told(
    copy: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def version() -> int:
        if number:
            raise OSError(number, os.strerror(number))
        return 1

    monkeypatch.setattr(confined, "landlock_version", version)
    copy(Copy(polls=1))
    run = Run()
    assert run.compile() == ""
    assert [note for note in run.told if "no Landlock" in note] == run.told
    assert len(run.told) == bool(number)


def test_one_that_slows_the_training_is_ended(copy: Any) -> None:
    made, run = copy(Copy()), Run()
    assert "slowed the training" in run.compile(2 * PLAIN_S)
    assert made.killed
    assert run.forms == {}
    assert ALLOWED_S < run.background.slowed_s < ALLOWED_S + 2 * PLAIN_S


def test_a_validation_counts_as_a_slow_step(copy: Any) -> None:
    copy(Copy(polls=1))
    run = Run()
    assert run.compile(1000 * PLAIN_S) == ""
    assert run.background.slowed_s == pytest.approx((MOST_TIMES - 1) * PLAIN_S)


def test_one_that_takes_too_long_is_ended(copy: Any) -> None:
    made, run = copy(Copy(seconds=background.BOX_S + 1)), Run()
    assert "600 s" in run.compile()
    assert made.killed


@pytest.mark.parametrize(
    "error",
    [BlockingIOError(11, "not now"), RuntimeError("not now: an audit hook")],
    ids=["system", "script"],
)
def test_a_process_that_can_not_be_forked(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> Any:
        raise error

    monkeypatch.setattr(shadow, "begin", fail)
    run = Run()
    assert "not now" in run.compile()
    assert run.roots.on_call == []


def test_calls_of_another_form_are_not_compiled(copy: Any) -> None:
    copy(Copy())
    run = Run()
    assert "no longer called" in run.compile(batch=torch.randn(3, 2))
    assert run.roots.on_call == []
    assert WATCHED_STEPS < 10_000


def test_without_memory_nothing_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert no_room_to_fork() == ""
    monkeypatch.setattr(background, "free_bytes", lambda: 1 << 20)
    assert "no memory" in no_room_to_fork()


def outlook(
    steps: int = 20, earlier: Earlier | None = None, max_steps: int | None = None
) -> tuple[Outlook, Any]:
    shared: Any = SimpleNamespace(
        meter=SimpleNamespace(steps=steps),
        plan=SimpleNamespace(earlier=earlier, max_steps=max_steps),
    )
    return Outlook(shared, StepClock()), shared


def test_the_rest_is_that_of_an_earlier_run_or_of_the_limit() -> None:
    def left(**known: Any) -> int | None:
        return outlook(**known)[0].prospect(PLAIN_S, 1, forks=True).steps_left

    assert left() is None
    assert left(max_steps=100) == 80
    assert left(earlier=Earlier("", steps=50), max_steps=100) == 30
    assert left(earlier=Earlier("", steps=10)) is None, "it lasts longer than the earlier one"


def test_an_epoch_that_has_begun_is_known_to_go_on() -> None:
    found, shared = outlook(steps=1)
    with ExitStack() as undo:
        found.install(undo)
        found.begin()
        batches = iter(DataLoader(range(100), batch_size=1))
        for _ in range(20):
            next(batches)
        shared.meter.steps = 21
        assert found.prospect(PLAIN_S, 1, forks=True).at_least_left == 80
        shared.meter.steps = 6  # four batches make a step
        assert found.prospect(PLAIN_S, 1, forks=True).at_least_left == 20
        del batches
        assert found.prospect(PLAIN_S, 1, forks=True).at_least_left == 0


def test_the_compilation_costs_its_time_where_no_core_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, _ = outlook(earlier=Earlier("", background_s=9.0, stall_s=4.0))
    for idle, forks, cost_s in [(True, True, 4.0), (False, True, 13.0), (True, False, 13.0)]:
        monkeypatch.setattr(outlook_module, "has_idle_core", lambda idle=idle: idle)
        assert found.prospect(PLAIN_S, 1, forks=forks).cost_s == cost_s
    monkeypatch.setattr(outlook_module, "has_idle_core", lambda: False)
    guessed_s = outlook()[0].prospect(PLAIN_S, 1, forks=True).cost_s
    busy, _ = outlook(earlier=Earlier("", background_s=900.0))
    assert busy.prospect(PLAIN_S, 1, forks=True).cost_s == guessed_s, "it waited for the others"
    slow, _ = outlook(earlier=Earlier("", background_s=900.0, slowed_s=50.0, stall_s=4.0))
    assert slow.prospect(PLAIN_S, 1, forks=True).cost_s == 54.0
    warm, _ = outlook(earlier=Earlier("", stall_s=4.0, compile_s=3.0))
    assert warm.prospect(PLAIN_S, 1, forks=True).cost_s == 7.0


def test_a_warm_cache_costs_what_a_switch_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(outlook_module, "has_idle_core", lambda: False)
    earlier = Earlier("", background_s=9.0, slowed_s=8.0, stall_s=4.0, cache=str(tmp_path))

    def cost_s() -> float:
        return outlook(earlier=earlier)[0].prospect(PLAIN_S, 1, forks=True).cost_s

    assert cost_s() == 13.0, "nobody says that this run has that cache"
    monkeypatch.setenv(outlook_module.CACHE_FOLDER, str(tmp_path))
    assert cost_s() == 13.0, "it was emptied"
    (tmp_path / "fxgraph").mkdir()
    assert cost_s() == 8.0
    monkeypatch.setenv(outlook_module.CACHE_FOLDER, str(tmp_path / "other"))
    assert cost_s() == 13.0


def test_what_is_not_tried_needs_an_earlier_run() -> None:
    found, _ = outlook(max_steps=10**9)
    prospect = found.prospect(PLAIN_S, 1, forks=False)
    assert found.decide(prospect, tries=True).verdict == "begin"
    assert found.decide(prospect, tries=False).verdict == "never"
    unknown, _ = outlook()
    prospect = replace(unknown.prospect(PLAIN_S, 1, forks=False), elapsed_s=1.0)
    assert unknown.decide(prospect, tries=True).verdict == "wait"
    assert "earlier run" in unknown.decide(prospect, tries=False).why
    dropped = Earlier("2026-11-26", dropped="slower")
    assert "slower" in outlook(earlier=dropped)[0].decide(prospect, tries=True).why
