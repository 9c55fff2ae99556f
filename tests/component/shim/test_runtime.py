"""The runtime reports while the script runs, and never stands in its way."""

from __future__ import annotations

import json
import math
import multiprocessing
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain.launch.hang.heartbeats import HeartbeatRecords
from fasttrain.model.codec import loads
from fasttrain.model.outcome import RankReport, State
from fasttrain.shim import runtime as runtime_module
from fasttrain.shim.hooks.steps import StepMeter
from fasttrain.shim.reporter import NOT_RECORDED
from fasttrain.shim.runtime import Runtime


@pytest.fixture
def install(plan: Any, tmp_path: Path) -> Iterator[Any]:
    made: list[Runtime] = []

    def install(**choices: Any) -> Runtime:
        made.append(Runtime(plan(tmp_path, **choices), 3, time.perf_counter()))
        made[-1].install()
        return made[-1]

    yield install
    for runtime in made:
        runtime.close()


def report(run_dir: Path) -> RankReport:
    return loads(RankReport, (run_dir / "rank-3.json").read_bytes())


def train(steps: int) -> None:
    model = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(4, 2)).sum().backward()
        sgd.step()


def test_a_report_from_the_start(install: Any, tmp_path: Path) -> None:
    install(amp="bfloat16")
    first = report(tmp_path)
    assert (first.rank, first.stats.steps, first.finished) == (3, 0, False)
    assert {o.lever: o.state for o in first.outcomes} == {
        "amp": State.ARMED,
        "compile": State.OFF,
        "optimizer": State.OFF,
        "matmul": State.OFF,
    }


def test_a_report_with_the_first_step(install: Any, tmp_path: Path) -> None:
    install(amp="bfloat16", optimizer="fused")
    train(1)
    first = report(tmp_path)
    assert (first.stats.steps, first.device) == (1, "cpu")
    assert {o.lever: o.counts for o in first.outcomes if o.counts} == {
        "amp": {"forwards": 1},
        "optimizer": {"steps": 1},
    }


def test_steps_of_a_replay_are_not_trained(install: Any, tmp_path: Path) -> None:
    """A run that fails in it would be started again at once for ever."""
    runtime = install(hang=True)
    heartbeats = HeartbeatRecords(tmp_path)
    heartbeats.find()

    def known() -> tuple[int, int]:
        runtime.finish()
        (seen,) = heartbeats.read()
        return report(tmp_path).stats.steps, seen.steps

    model = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    for replayed in (math.inf, 2, 2):
        runtime._lever_state.replayed = replayed
        model(torch.ones(4, 2)).sum().backward()
        sgd.step()
        counts.append(known())
    heartbeats.close()
    assert counts == [(0, 0), (2, 0), (3, 3)]
    assert report(tmp_path).stats.resumed_from == 2


def test_a_report_every_few_seconds_without_steps(
    install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(amp="bfloat16")
    model = nn.Linear(2, 2)
    model(torch.ones(4, 2))
    assert report(tmp_path).outcomes[0].state is State.ARMED
    monkeypatch.setattr(runtime_module, "REPORT_EVERY_S", 0.0)
    model(torch.ones(4, 2))
    assert report(tmp_path).outcomes[0].counts == {"forwards": 1}  # made before this call


def test_the_last_report(install: Any, tmp_path: Path) -> None:
    runtime = install()
    train(5)
    runtime.finish()
    last = report(tmp_path)
    assert (last.stats.steps, last.finished) == (5, True)
    lines = (tmp_path / "events-3.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["step"] for event in events] == [1, 5]
    assert stat.S_IMODE((tmp_path / "rank-3.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("amp", ["off", "bfloat16"])
def test_the_device_of_a_model_that_is_gone(install: Any, tmp_path: Path, amp: str) -> None:
    runtime = install(amp=amp)
    train(1)  # its model is local to it, as most are
    runtime.finish()
    assert report(tmp_path).device == "cpu"


def test_it_stops_after_as_many_steps_as_wanted(install: Any, tmp_path: Path) -> None:
    install(max_steps=2, optimizer="fused")
    with pytest.raises(SystemExit) as stopped:
        train(5)
    assert stopped.value.code == 0
    assert report(tmp_path).stats.steps == 1  # the rest is told at the end


def test_it_stops_in_a_later_fold(install: Any) -> None:
    runtime = install(max_steps=12)
    train(8)
    with pytest.raises(SystemExit):
        train(8)
    assert runtime._meter.steps == 12


def test_it_stops_behind_the_last_optimizer_of_an_iteration(install: Any) -> None:
    install(max_steps=3)
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    critic, generator = (torch.optim.SGD(it.parameters(), lr=0.1) for it in (one, other))
    made = []

    def play() -> None:
        for _ in range(9):
            for model, optimizer in ((one, critic), (other, generator)):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                made.append(optimizer)

    with pytest.raises(SystemExit):
        play()
    assert [made.count(critic), made.count(generator)] == [3, 3]


def test_it_stops_after_as_many_backward_passes(install: Any, tmp_path: Path) -> None:
    runtime = install(max_steps=3)
    weight = torch.ones((), requires_grad=True)
    for _ in range(3):
        (weight * 2).backward()
    with pytest.raises(SystemExit):
        (weight * 2).backward()
    assert weight.grad == 6, "the fourth was not begun"
    runtime.finish()
    assert (report(tmp_path).stats.steps, report(tmp_path).stats.are_passes) == (3, True)


def test_it_does_not_stop_in_a_replay(install: Any) -> None:
    runtime = install(max_steps=2)
    runtime._lever_state.replayed = math.inf
    train(3)
    runtime._lever_state.replayed = runtime._meter.steps
    with pytest.raises(SystemExit):
        train(1)


def test_a_lost_run_directory_is_told_once(
    install: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = install()
    for path in tmp_path.iterdir():
        path.unlink()
    tmp_path.rmdir()
    train(3)
    runtime.finish()
    assert capsys.readouterr().err.count(NOT_RECORDED) == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_writes_nothing(install: Any, tmp_path: Path) -> None:
    runtime = install()
    train(1)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def child() -> None:
        train(3)
        runtime.finish()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(20)
    assert process.exitcode == 0
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_threads_that_make_steps_take_turns_in_what_is_compared(install: Any) -> None:
    runtime, inside, together = install(), threading.Lock(), list[bool]()

    class Comparing:
        done = False

        def after_step(self) -> None:
            together.append(not inside.acquire(blocking=False))
            time.sleep(0.01)  # in which the other thread would come, too
            inside.release()

        def finish(self) -> None:
            pass

    runtime._tuner = Comparing()
    with ThreadPoolExecutor(2) as pool:
        assert [each.result() for each in [pool.submit(train, 5) for _ in range(2)]] == [None] * 2
    assert together
    assert not any(together)


def test_nothing_is_compared_in_a_step_that_the_script_captures(
    install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, compared = install(), list[int]()
    comparing: Any = SimpleNamespace(
        done=False, after_step=lambda: compared.append(1), finish=lambda: None
    )
    runtime._tuner = comparing
    monkeypatch.setattr(StepMeter, "capturing", True)
    train(3)
    assert compared == []
    monkeypatch.setattr(StepMeter, "capturing", False)
    train(3)
    assert compared == [1, 1, 1]
