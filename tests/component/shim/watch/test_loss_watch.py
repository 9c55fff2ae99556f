"""A loss that is no number is told, with the line that goes backward from it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fasttrain.shim.watch.nan_guard import IN_A_ROW, FiniteRing, LossWatch, NanGuard

NAN, INF = math.nan, math.inf
HERE = Path(__file__)


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as undo:
        yield undo


@pytest.fixture
def watch(undo: ExitStack) -> LossWatch:
    watch = LossWatch()
    watch.install(undo)
    return watch


def a_loss(value: float) -> Tensor:
    """Return a loss whose gradient is finite, whatever its value."""
    return torch.ones((), requires_grad=True) + value


def line_of(text: str) -> int:
    lines = HERE.read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.endswith(text))
    return number


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_loss_whose_gradient_is_finite(watch: LossWatch, bad: float) -> None:
    for value in [1.0, bad, 1.0] + [bad] * IN_A_ROW:
        a_loss(value).backward()  # told
        watch.step()
    (told,) = watch.read()
    place = f"{HERE.name}:{line_of('# told')}"
    assert re.search(rf"{re.escape(place)}\b.* step 4\b", told)
    assert list(watch.read()) == []


def test_a_loss_that_is_worked_out_without_numbers(watch: LossWatch) -> None:
    with FakeTensorMode():
        for _ in range(IN_A_ROW):
            a_loss(NAN).backward()
            watch.step()
    assert list(watch.read()) == []


def test_one_of_two_losses_by_turns(watch: LossWatch) -> None:
    for _ in range(IN_A_ROW):
        a_loss(1.0).backward()
        a_loss(NAN).backward()  # the second
        watch.step()
    (told,) = watch.read()
    assert f"{HERE.name}:{line_of('# the second')} " in told


def test_two_on_one_line_are_two(watch: LossWatch) -> None:
    for _ in range(IN_A_ROW):
        (a_loss(1.0).backward(), a_loss(NAN).backward())
        watch.step()
    assert len(list(watch.read())) == 1


@pytest.mark.parametrize("values", [[NAN, NAN, 1.0, NAN, NAN], [1e30] * 9])
def test_what_is_no_reason(watch: LossWatch, values: list[float]) -> None:
    for value in values:
        a_loss(value).backward()
        watch.step()
    assert list(watch.read()) == []


def test_a_pass_that_no_step_follows(watch: LossWatch) -> None:
    for value in [NAN] * IN_A_ROW + [1.0]:
        a_loss(value).backward()  # those before the last may have been dropped
    watch.step()
    for _ in range(IN_A_ROW):
        watch.step()  # of an optimizer that goes on without losses
    assert list(watch.read()) == []


def test_several_passes_for_each_step(watch: LossWatch) -> None:
    for _ in range(IN_A_ROW):
        for _ in range(4):
            a_loss(INF).backward()
        watch.step()
    (told,) = watch.read()
    assert re.search(r" step 1\b", told)


@pytest.mark.parametrize("during", ["keep", "read"])
def test_a_pass_of_another_thread_meanwhile(
    watch: LossWatch, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    original = getattr(FiniteRing, during)

    def interrupted(ring: FiniteRing) -> bool:
        thread = Thread(target=a_loss(2.0).backward)
        thread.start()
        thread.join()
        kept: bool = original(ring)
        return kept

    a_loss(1.0).backward()
    monkeypatch.setattr(FiniteRing, during, interrupted)
    watch.step()
    assert list(watch.read()) == []


def test_only_scalars_are_losses(watch: LossWatch) -> None:
    for _ in range(IN_A_ROW):
        (torch.ones(2, requires_grad=True) + NAN).backward(torch.ones(2))
        watch.step()
    assert list(watch.read()) == []


def test_a_loss_of_one_element_in_low_precision(watch: LossWatch) -> None:
    for _ in range(IN_A_ROW):
        (torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True) + NAN).backward()
        watch.step()
    assert len(list(watch.read())) == 1


def test_a_mistake_has_no_frame_of_ours(watch: LossWatch) -> None:
    with pytest.raises(RuntimeError, match="does not require grad") as caught:
        torch.ones(()).backward()
    assert not [entry for entry in caught.traceback if "fasttrain/shim" in str(entry.path)]


def test_a_compiled_function_that_goes_backward(watch: LossWatch) -> None:
    frames = []

    def note(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        frames.append(str(graph.graph))
        return graph.forward

    @torch.compile(backend=note)
    def step(weight: Tensor) -> None:
        (weight * NAN).sum().backward()

    for _ in range(IN_A_ROW):
        step(torch.ones(2, requires_grad=True))
        watch.step()
    assert len(frames) == 1, "dynamo compiles the script's frame, and none of ours"
    assert len(list(watch.read())) == 1


def test_backward_is_torchs_own() -> None:
    torchs = vars(Tensor)["backward"]
    with ExitStack() as undo:
        LossWatch().install(undo)
        assert vars(Tensor)["backward"] is not torchs
        assert Tensor.backward is torchs
        weight = torch.ones((), requires_grad=True)
        Tensor.backward(weight * 2)
        assert weight.grad == 2
    assert vars(Tensor)["backward"] is torchs


def test_what_the_script_has_put_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "backward", vars(Tensor)["backward"])  # put back at the end
    own = lambda loss: None  # noqa: E731
    with ExitStack() as undo:
        LossWatch().install(undo)
        setattr(Tensor, "backward", own)  # noqa: B010
    assert vars(Tensor)["backward"] is own


@pytest.mark.parametrize("choice", ["warn", "stop"])
def test_the_guard_tells_it_or_ends_the_run(
    undo: ExitStack, capsys: pytest.CaptureFixture[str], choice: Any
) -> None:
    guard = NanGuard(choice, lambda: False)
    guard.install(undo)
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    for _ in range(IN_A_ROW):
        a_loss(NAN).backward()
        sgd.step()
    if choice == "stop":
        with pytest.raises(SystemExit) as stopped:
            guard.read()
        assert stopped.value.code == 65
    else:
        guard.read()
    assert re.search(r"\bloss\b.* step 1\b", capsys.readouterr().err)
    assert re.search(r"\bloss\b.* step 1\b", guard.warnings[0])


@pytest.mark.parametrize("by", ["the script", "a GradScaler"])
def test_passes_whose_steps_are_left_out(undo: ExitStack, by: str) -> None:
    guard = NanGuard("stop", lambda: False)
    guard.install(undo)
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", enabled=by == "a GradScaler")
    for value in [1.0, *[NAN] * 2 * IN_A_ROW, 1.0]:
        sgd.zero_grad()
        scaler.scale((model(torch.ones(2)) * value).sum()).backward()
        if scaler.is_enabled():
            scaler.step(sgd)
            scaler.update()
        elif math.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
            sgd.step()
    guard.read()
    assert guard.warnings == []


def test_gradients_are_told_rather_than_the_loss(undo: ExitStack) -> None:
    guard = NanGuard("warn", lambda: False)
    guard.install(undo)
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(IN_A_ROW):
        (model(torch.ones(2)) * NAN).sum().backward()
        sgd.step()
    guard.read()
    (told,) = guard.warnings
    assert "Linear: weight" in told


def test_off_sees_nothing(undo: ExitStack) -> None:
    torchs = vars(Tensor)["backward"]
    NanGuard("off", lambda: False).install(undo)
    assert vars(Tensor)["backward"] is torchs
