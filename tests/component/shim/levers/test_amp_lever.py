"""Autocast is around each root, and nowhere when the script manages precision itself."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.parallel import parallel_apply
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fasttrain.model.outcome import State
from fasttrain.shim.levers.amp import lever
from fasttrain.shim.levers.amp.lever import IN_THREADS
from support.rig import Probe

X = torch.ones(4, 2)


def test_a_call_computes_in_bf16_and_gives_fp32(amp: Any) -> None:
    model = Probe()
    assert model(X).dtype is torch.float32
    assert model.seen == [torch.bfloat16]
    assert not torch.is_autocast_enabled("cpu")
    outcome = amp()
    assert (outcome.state, outcome.counts) == (State.APPLIED, {"forwards": 1})
    assert [(site.what, site.count) for site in outcome.sites] == [("Probe", 1)]


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("compile_", ["off", "default"])
def test_a_tensor_in_two_places_of_the_output_stays_one(
    rig: Any, backend: Any, compile_: str
) -> None:
    class Twice(Probe):
        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            return {"y": y, "all": [y, (y, y + 1)]}

    with backend("aot_eager"), rig(amp="bfloat16", compile=compile_):
        output = Twice()(X)
    first, (again, other) = output["all"]
    assert output["y"].dtype is other.dtype is torch.float32
    assert output["y"] is first
    assert output["y"] is again
    assert output["y"] is not other


def test_a_forward_that_runs_after_its_call_is_not_counted(amp: Any) -> None:
    class Stepwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Probe()

        def forward(self, x: Any) -> Any:
            for _ in range(2):
                x = self.part(x)
                yield x

    class Awaited(Stepwise):
        async def forward(self, x: Any) -> Any:  # type: ignore[override]
            return self.part(x)

    stepwise, awaited = Stepwise(), Awaited()
    assert [y.dtype for y in stepwise(X)] == [torch.float32] * 2
    with pytest.raises(StopIteration):
        awaited(X).send(None)
    assert stepwise.part.seen + awaited.part.seen == [torch.bfloat16] * 3
    outcome = amp()
    assert outcome.counts == {"forwards": 3}
    assert {site.what for site in outcome.sites} == {"Probe"}
    assert sum(lever.RUNS_LATER in note for note in outcome.notes) == 2
    assert not any(lever.BY_HAND in note for note in outcome.notes)


def test_methods_other_than_forward(amp: Any) -> None:
    class WithLoss(Probe):
        def loss(self, x: Any) -> Any:
            return self.linear(x).dtype, self(x).dtype

    model = WithLoss()
    assert model.loss(X) == (torch.float32, torch.float32)
    assert amp().counts == {"forwards": 2}
    assert model.seen == [torch.bfloat16]


def test_an_island_without_autocast_inside_the_model(amp: Any) -> None:
    class Island(Probe):
        def forward(self, x: Any) -> Any:
            with torch.autocast("cpu", enabled=False):
                precise = super().forward(x)
            return precise, super().forward(x)

    model = Island()
    model(X)
    assert model.seen == [torch.float32, torch.bfloat16]
    assert amp().state is State.APPLIED


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_of_another_precision_is_left_alone(amp: Any, dtype: torch.dtype) -> None:
    model = Probe().to(dtype)
    assert model(X.to(dtype)).dtype is dtype
    outcome = amp()
    assert outcome.state is State.SKIPPED
    assert str(dtype).removeprefix("torch.") in outcome.reason


@pytest.mark.parametrize("number", [math.log(14), [0.5]])
def test_a_single_number_does_not_decide_the_precision_of_a_model(amp: Any, number: Any) -> None:
    class Scaled(Probe):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(number, dtype=torch.float64))

    model = Scaled()
    model(X)
    assert model.seen == [torch.bfloat16]
    assert amp().state is State.APPLIED


def test_a_model_without_a_device_is_left_alone(amp: Any) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
        assert model(torch.ones(4, 2)).dtype is torch.float32
    assert amp().state is State.SKIPPED


def test_a_device_that_was_not_decided_for(rig: Any, machine: Any) -> None:
    with rig(machine, amp="bfloat16", device="cuda") as runtime:
        model = Probe()
        model(X)
        assert model.seen == [torch.float32]
        assert "cpu" in runtime.outcomes()["amp"].reason
    with rig(amp="bfloat16", device="cuda") as runtime:  # but the user asked for bf16
        model(X)
        assert model.seen == [torch.float32, torch.bfloat16]


def test_binary_cross_entropy_inside_the_model(amp: Any) -> None:
    class WithLoss(Probe):
        def forward(self, x: Any, target: Any) -> Any:
            return F.binary_cross_entropy(super().forward(x).sigmoid(), target, target)

    model, target = WithLoss(), torch.ones(4, 2)
    loss = model(X, target)
    expected = F.binary_cross_entropy(
        nn.functional.linear(X.bfloat16(), model.linear.weight.bfloat16(),
                             model.linear.bias.bfloat16()).sigmoid().float(),
        target,
    )  # fmt: skip
    assert loss.item() == expected.item()
    loss.backward()
    assert amp().state is State.APPLIED


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_still_knows_binary_cross_entropy(amp: Any) -> None:
    loss = torch.jit.script(nn.BCELoss())
    assert loss(torch.tensor([0.5]), torch.tensor([1.0])).item() == pytest.approx(0.6931472)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_models(amp: Any) -> None:
    for model in (
        torch.jit.script(nn.Linear(2, 2)),
        torch.jit.trace(nn.Linear(2, 2), X),
    ):
        result = model(X)
        assert result.dtype is torch.float32
        assert torch.equal(result, result.bfloat16().float())  # it was computed in bf16
        result.sum().backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_repeats_in_bf16(amp: Any, use_reentrant: bool) -> None:
    class Thrifty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Probe()

        def forward(self, x: Any) -> Any:
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

    model = Thrifty()
    model(X.clone().requires_grad_()).sum().backward()
    assert set(model.inner.seen) == {torch.bfloat16}
    assert model.inner.linear.weight.grad is not None
    assert amp().state is State.APPLIED
    assert amp().counts == {"forwards": 1}


@pytest.mark.parametrize("on", [True, False])
def test_a_checkpoint_repeats_its_forward_pass_whatever_was_switched_since(
    rig: Any, on: bool
) -> None:
    with rig(amp="bfloat16") as runtime:
        (lever,) = (it for it in runtime._levers if it.recorder.lever == "amp")
        model = Probe()
        lever.switch(on=on)
        with set_checkpoint_early_stop(enable=False):
            loss = checkpoint(model, X, use_reentrant=False).sum()
        lever.switch(on=not on)
        loss.backward()
        assert model.seen == 2 * [torch.bfloat16 if on else torch.float32]
        model(X)
        assert model.seen[2] is not model.seen[1]


def test_functional_transforms(amp: Any) -> None:
    model = nn.Linear(2, 1)

    def loss(weights: Any, x: Any) -> Any:
        return torch.func.functional_call(model, weights, (x,)).sum()

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(
        {name: p.detach() for name, p in model.named_parameters()}, X
    )
    assert gradients["weight"].tolist() == [[[1.0, 1.0]]] * 4


def test_outputs_changed_in_place(amp: Any) -> None:
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    result = model(X)
    result += 1
    result.sum().backward()
    assert result.tolist() == [[3.0, 3.0]] * 4
    assert model.bias.grad is not None
    assert model.bias.grad.tolist() == [4.0, 4.0]


def test_no_weights_of_an_earlier_step(amp: Any) -> None:
    model = nn.Linear(1, 1, bias=False)
    for value in (1.0, 2.0, 3.0):
        nn.init.constant_(model.weight, value)
        assert model(torch.ones(1, 1)).item() == value


def by_optimizer(model: nn.Module, loss: Callable[[], Any]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for _ in range(20):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def by_hand(model: nn.Module, loss: Callable[[], Any]) -> None:
    for _ in range(20):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss(), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.25 * gradient


def by_line_search(model: nn.Module, loss: Callable[[], Any]) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=10)

    def closure() -> Any:
        optimizer.zero_grad()
        found = loss()
        found.backward()
        return found

    optimizer.step(closure)


def after_a_look(model: nn.Module, loss: Callable[[], Any]) -> None:
    """Use the weights between a backward pass and the step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for _ in range(20):
        optimizer.zero_grad()
        loss().backward()
        loss()
        optimizer.step()


@pytest.mark.parametrize("fit", [by_optimizer, by_hand, by_line_search, after_a_look])
def test_a_forward_that_trains_computes_with_the_weights_of_its_last_step(
    amp: Any, fit: Callable[[nn.Module, Callable[[], Any]], None]
) -> None:
    class Fitting(nn.Module):
        """Fits a head in each call, as few-shot evaluation and adaptation at test time do."""

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1, 1, bias=False)
            nn.init.ones_(self.head.weight)

        def forward(self, x: Any) -> Any:
            fit(self, lambda: (self.head(x) - 3.0).square().mean())
            return self.head(x)

    found = Fitting()(torch.ones(4, 1))
    assert found[0].item() == pytest.approx(3.0, abs=0.05)
    assert amp().counts == {"forwards": 1}


def test_threads_do_not_share_autocast(amp: Any) -> None:
    inside, done = threading.Event(), threading.Event()

    class Waiting(Probe):
        def forward(self, x: Any) -> Any:
            inside.set()
            done.wait(120)
            return super().forward(x)

    model = Waiting()
    thread = threading.Thread(target=model, args=(X,))
    thread.start()
    inside.wait(120)
    assert not torch.is_autocast_enabled("cpu")
    done.set()
    thread.join()
    assert model.seen == [torch.bfloat16]


@pytest.fixture
def threads_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch run replicas on the CPU."""
    accelerator, on = torch.accelerator, torch.is_autocast_enabled
    if not hasattr(accelerator, "device_index"):
        pytest.skip("needs torch 2.9, whose parallel_apply asks torch.accelerator")
    monkeypatch.setattr(accelerator, "is_available", lambda: True)
    monkeypatch.setattr(accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(accelerator, "current_stream", lambda _: nullcontext())
    monkeypatch.setattr(accelerator, "device_index", nullcontext)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cpu": on(device))


def test_replicas_in_threads_do_not_run_in_another_precision(
    rig: Any, threads_of_replicas: None
) -> None:
    class Replicated(Probe):
        def forward(self, x: Any) -> Any:
            outputs = parallel_apply([super().forward] * 2, [x, x], devices=[0, 0])
            self.seen.append(self.linear(x).dtype)
            return outputs[0]

    with rig(amp="float16") as runtime:
        model = Replicated()
        model(X)
        model(X)
        assert model.seen == [torch.float32] * 2 + [torch.float16] + [torch.float32] * 3
        outcome = runtime.outcomes()["amp"]
    assert any(IN_THREADS in note for note in outcome.notes)


def test_an_exception_leaves_autocast(amp: Any) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        nn.Linear(2, 2)(torch.ones(4, 3))
    assert not torch.is_autocast_enabled("cpu")
    assert Probe()(X).dtype is torch.float32


@pytest.mark.parametrize("right", [False, True])
def test_weights_are_cached_only_where_a_no_grad_before_does_no_harm(
    rig: Any, monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    class Twice(nn.Linear):
        def forward(self, x: Any) -> Any:
            caching.append(torch.is_autocast_cache_enabled())
            with torch.no_grad():
                condition = super().forward(x)
            return super().forward(x + condition)

    caching: list[bool] = []
    monkeypatch.setattr(lever, "_cache_has_gradients", lambda: right)
    with rig(amp="bfloat16"):
        model = Twice(4, 4)
        model(torch.ones(2, 4)).sum().backward()
    assert caching == [right]
    assert model.weight.grad is not None
    assert torch.is_autocast_cache_enabled()
