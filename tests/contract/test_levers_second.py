"""Second derivatives that nothing in the source announces: as without compilation."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain.model.outcome import State
from support.rig import X, backend, network, rig

# dynamo warns while it compiles; here that would be an error inside the compiler
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
SECOND = bool(X.numel())  # no literal that could be found in the source


class Tied(nn.Module):
    """One weight goes into two graphs, the second time with what was computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 0.5)

    def forward(self, x: Any) -> Any:
        y = torch.tanh(x @ self.weight)
        torch._dynamo.graph_break()
        return (y @ self.weight).sigmoid()


class Bundled(nn.Module):
    """Returns views of what it computes, something that needs no gradient, and a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Any) -> Any:
        y = self.inner(x).tanh()
        return {"rows": y.unbind(0), "flat": y.view(-1), "best": y.argmax(1), "y": y}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(network(), nn.Sigmoid()),
    "dropout": lambda: nn.Sequential(network(), nn.Dropout(0.4), nn.Sigmoid()),
    "batch norm": lambda: nn.Sequential(network(), nn.BatchNorm1d(4), nn.Sigmoid()),
    "tied": Tied,
    "bundled": Bundled,
}


def total(output: Any) -> torch.Tensor:
    if isinstance(output, dict):
        return output["y"].sum() + output["flat"].square().sum() + output["rows"][1].sum()
    result: torch.Tensor = output.sum()
    return result


def penalized(model: nn.Module, every: int) -> list[float]:
    """Train with a gradient penalty in some steps; give losses, and the buffers at the end."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        x = (X + 0.1 * step).requires_grad_()
        loss = total(model(x)) + total(model(x * 2))
        if step % every == every - 1:
            wanted = [x, *model.parameters()]
            slopes = torch.autograd.grad(loss, wanted, create_graph=SECOND)
            loss = loss + sum(slope.square().mean() for slope in slopes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, *(buffer.sum().item() for buffer in model.buffers())]


@pytest.mark.parametrize(("name", "every"), [*((name, 2) for name in MODELS), ("plain", 1)])
def test_a_penalty_is_that_of_an_eager_run(name: str, every: int) -> None:
    expected = penalized(MODELS[name](), every)
    with backend("aot_eager"), rig(compile="default") as runtime:
        found = penalized(MODELS[name](), every)
        outcome = runtime.outcomes()["compile"]
    assert found == pytest.approx(expected, rel=1e-4)
    assert outcome.state is State.SKIPPED
    assert re.search(r"\(create_graph=True at .*test_levers_second\.py:\d+\)", outcome.reason)
    assert outcome.counts["graphs"] > 0


def test_low_precision_is_repeated_as_it_was() -> None:
    def first_loss() -> float:
        return penalized(MODELS["plain"](), 1)[0]

    with backend("aot_eager"), rig(compile="default", amp="bfloat16"):
        found = first_loss()
    with rig(amp="bfloat16"):
        expected = first_loss()
    assert found == pytest.approx(expected, rel=1e-6)
    assert found != pytest.approx(first_loss(), rel=1e-5)


def test_gradients_for_several_vectors_at_once() -> None:
    def jacobian(model: nn.Module) -> list[torch.Tensor]:
        x = X.clone().requires_grad_()
        out = model(x)
        vectors = torch.eye(out.shape[1])[:, None].expand(-1, len(x), -1)
        asked = (out, (x, *model.parameters()), vectors)
        first = torch.autograd.grad(*asked, is_grads_batched=True, retain_graph=True)
        parts = torch.autograd.grad(
            iter([out]), dict(model.named_parameters()), vectors, True, is_grads_batched=True
        )
        whole = torch.autograd.grad(out, model.parameters(), vectors, True, is_grads_batched=True)
        nothing = torch.autograd.grad(
            out, (x, X.clone().requires_grad_()), (vectors,), None, False, True, True, True
        )
        assert nothing[1] is None
        return [*first, nothing[0], *parts.values(), *whole]

    with backend("aot_eager"), rig(compile="default") as runtime:
        found = jacobian(network())
        outcome = runtime.outcomes()["compile"]
    assert outcome.counts["graphs"] > 0
    assert "a batch of gradients" in outcome.reason
    for one, other in zip(found, jacobian(network()), strict=True):
        torch.testing.assert_close(one, other)


def test_third_derivatives() -> None:
    def third(model: nn.Module) -> torch.Tensor:
        x = X.clone().requires_grad_()
        value = model(x).sum()
        for _ in range(2):
            value = torch.autograd.grad(value, x, create_graph=SECOND)[0].square().sum()
        return torch.autograd.grad(value, x)[0]

    with backend("aot_eager"), rig(compile="default"):
        found = third(MODELS["plain"]())
    torch.testing.assert_close(found, third(MODELS["plain"]()))


def test_the_other_models_stay_compiled() -> None:
    critic, generator = MODELS["plain"](), network()
    with backend("aot_eager"), rig(compile="default") as runtime:
        for _ in range(3):
            fake = generator(X)
            slope = torch.autograd.grad(critic(fake).sum(), fake, create_graph=SECOND)[0]
            slope.square().sum().backward()
        outcome = runtime.outcomes()["compile"]
        slots = [model._compiled_call_impl is not None for model in (critic, generator)]
    assert slots == [False, True]
    assert outcome.state is State.APPLIED
    assert any("create_graph=True" in note for note in outcome.notes)


def test_inputs_changed_in_between_are_an_error() -> None:
    with backend("aot_eager"), rig(compile="default"):
        model, x = MODELS["plain"](), X.clone().requires_grad_()
        y = model(x)
        with torch.no_grad():
            model[0][0].bias.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y.sum(), x, create_graph=SECOND)


def test_nothing_is_kept_after_a_plain_backward_pass() -> None:
    with backend("aot_eager"), rig(compile="default"):
        x = X.clone()
        kept = weakref.ref(x)
        loss = network()(x).sum()
        del x
        assert kept() is not None
        loss.backward()
        assert kept() is None


class Cube(torch.autograd.Function):
    """Keeps an input."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


class Exponential(torch.autograd.Function):
    """Keeps an output, and returns what can't be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y, above = x.exp(), x > 0
        ctx.save_for_backward(y)
        ctx.mark_non_differentiable(above)
        return y, above

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any) -> Any:
        (y,) = ctx.saved_tensors
        return grad * y


class Scaled(torch.autograd.Function):
    """Has two inputs and a number, and keeps what it computed; autograd takes that as constant."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, factor: float) -> Any:
        inner = x.tanh()
        ctx.save_for_backward(inner, weight)
        ctx.x, ctx.factor = x, factor
        return inner * weight * factor

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        inner, weight = ctx.saved_tensors
        by_x = grad * weight * ctx.factor * (1 - ctx.x.tanh() ** 2)
        return by_x, (grad * ctx.factor * inner).sum(0), None


class Once(torch.autograd.Function):
    """Can't be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


class Custom(nn.Module):
    """Calls one of them between other operations."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self.inner = network()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.function = function

    def forward(self, x: Any) -> Any:
        x = self.inner(x)
        if self.function == "once":
            x = Once.apply(x) + x
        elif self.function == "cube":
            x = Cube.apply(x)
        elif self.function == "exponential":
            x, above = Exponential.apply(x)
            x = x + above
        else:
            x = Scaled.apply(x, self.weight, 1.5)
        return (x * self.weight).sigmoid()


@pytest.mark.filterwarnings("ignore")  # dynamo's, in which it would give up
@pytest.mark.parametrize("function", ["cube", "exponential", "scaled"])
def test_second_derivatives_of_custom_functions(function: str) -> None:
    """As without compilation; repeated from dynamo's graph, they would lack a term."""
    expected = penalized(Custom(function), 2)
    with backend("aot_eager"), rig(compile="default") as runtime:
        found = penalized(Custom(function), 2)
        outcome = runtime.outcomes()["compile"]
    assert found == pytest.approx(expected, rel=1e-5)
    assert outcome.counts["graphs"] > 0
    assert outcome.state is State.SKIPPED


@pytest.mark.filterwarnings("ignore")
def test_a_function_that_differentiates_once_refuses_more() -> None:
    def message(model: nn.Module) -> str:
        with pytest.raises(RuntimeError) as caught:
            penalized(model, 2)
        return str(caught.value)

    with backend("aot_eager"), rig(compile="default"):
        found = message(Custom("once"))
    assert "once_differentiable" in found
    assert found == message(Custom("once"))


@pytest.mark.filterwarnings("ignore")
def test_what_the_source_never_mentions_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a library takes the second derivative: refused by torch, and never wrong."""
    lever = "fasttrain.shim.levers.compile.lever"
    monkeypatch.setattr(f"{lever}.may_differentiate_twice", lambda: False)
    refused = pytest.raises(RuntimeError, match="double backward")
    with backend("aot_eager"), rig(compile="default"), refused:
        penalized(Custom("cube"), 2)


@pytest.mark.filterwarnings("ignore")
def test_under_auto_it_is_right_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    lever = "fasttrain.shim.levers.compile.lever"
    monkeypatch.setattr(f"{lever}.may_differentiate_twice", lambda: False)
    expected = penalized(Custom("cube"), 2)
    with backend("aot_eager"), rig(compile="auto") as runtime:
        model = Custom("cube")
        model(torch.ones(1, 4))
        (compiled,) = (part.lever for part in runtime._levers if hasattr(part, "lever"))
        compiled.begin([runtime._roots.last])
        compiled.switch(on=True)
        assert penalized(model, 2) == pytest.approx(expected, rel=1e-5)
        compiled.refresh()
        assert compiled.recorder.counts["graphs"] > 0
