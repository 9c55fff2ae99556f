"""Backward passes through some outputs of a compiled model alone: as without compilation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import grad

from fasttrain.model.outcome import State
from support.rig import X, backend, network, rig

# dynamo warns while it compiles; here that would be an error inside the compiler
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


class Apart(nn.Module):
    """Two networks that have nothing in common."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = network(), network()

    def forward(self, x: Any) -> Any:
        return self.actor(x), self.critic(x)


class Heads(nn.Module):
    """Two heads of one body; the second one may have an infinite derivative."""

    def __init__(self, *, root: bool = False, pooled: bool = False) -> None:
        super().__init__()
        pooling = nn.Sequential(nn.BatchNorm1d(4), nn.MaxPool1d(2), nn.Linear(2, 1))
        self.body, self.one = network(), nn.Linear(4, 2)
        self.two: nn.Module = pooling if pooled else nn.Linear(4, 1)
        self.root = root

    def forward(self, x: Any) -> Any:
        h = self.body(x)
        two = self.two(h)
        return self.one(h), two.clamp(max=0).abs().sqrt() if self.root else two


def in_turns(model: nn.Module) -> list[float | None]:
    """Train by one output after the other; return the sizes of weights and gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.2)
    found: list[float | None] = []
    for step in range(5):
        output = model(X)[step % 2 if step < 3 else 0]
        optimizer.zero_grad()
        output.square().mean().backward()
        optimizer.step()
        for weight in model.parameters():
            gradient = None if weight.grad is None else weight.grad.sum().item()
            found += [weight.sum().item(), gradient]
    return found


def one_by_one(model: Any, *, retain: bool) -> list[float | None]:
    """Train each part by a backward pass and an optimizer of its own."""
    parts = model.actor, model.critic
    first, second = (torch.optim.SGD(part.parameters(), 0.1) for part in parts)
    found: list[float | None] = []
    for _ in range(3):
        actions, value = model(X)
        first.zero_grad()
        actions.square().mean().backward(retain_graph=retain)
        first.step()
        second.zero_grad()
        value.square().mean().backward()
        second.step()
        found += [weight.sum().item() for weight in model.parameters()]
    return found


def compiled(train: Any, model: Any, **options: Any) -> tuple[Any, Any]:
    with backend("aot_eager"), rig(compile="default") as runtime:
        found = train(model, **options)
        outcome = runtime.outcomes()["compile"]
    assert outcome.counts["graphs"] == 1
    return found, outcome


def seeded(kind: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(**options)


def close(found: list[float | None], expected: list[float | None]) -> None:
    assert [value is None for value in found] == [value is None for value in expected]
    assert [v or 0 for v in found] == pytest.approx([v or 0 for v in expected], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("pooled", [False, True])
def test_what_the_loss_does_not_use_has_no_gradients_and_the_model_stays_compiled(
    pooled: bool,
) -> None:
    found, outcome = compiled(in_turns, seeded(Heads, pooled=pooled))
    close(found, in_turns(seeded(Heads, pooled=pooled)))
    assert outcome.state is State.APPLIED


@pytest.mark.parametrize("retain", [False, True])
def test_outputs_that_share_nothing_have_backward_passes_of_their_own(retain: bool) -> None:
    found, outcome = compiled(one_by_one, seeded(Apart), retain=retain)
    close(found, one_by_one(seeded(Apart), retain=retain))
    assert outcome.state is State.SKIPPED
    assert "test_compile_repeated.py" in outcome.reason


def test_zeros_do_not_become_nan_in_what_is_not_used() -> None:
    found, outcome = compiled(in_turns, seeded(Heads, root=True))
    close(found, in_turns(seeded(Heads, root=True)))
    assert outcome.state is State.SKIPPED


def test_a_second_pass_through_what_outputs_share_fails_as_without_compilation() -> None:
    def twice(model: nn.Module) -> None:
        one, two = model(X)
        one.sum().backward()
        with pytest.raises(RuntimeError, match="a second time"):
            two.sum().backward()

    twice(seeded(Heads))
    compiled(twice, seeded(Heads))


class Halted(Apart):
    """Its forward breaks the graph, so that models of this class share graphs."""

    def forward(self, x: Any) -> Any:
        torch._dynamo.graph_break()
        return super().forward(x)


def test_of_models_that_share_graphs_the_one_that_asks_runs_eagerly() -> None:
    first, second = seeded(Halted), seeded(Halted)
    with backend("aot_eager"), rig(compile="default"):
        for _ in range(2):
            sum(first(X)).sum().backward()
            second(X)[0].sum().backward()
        assert first._compiled_call_impl is not None
        assert second._compiled_call_impl is None


class Features(nn.Module):
    """Returns features, and what is computed from them."""

    def __init__(self, *, flat: bool = False) -> None:
        super().__init__()
        self.body, self.head = network(), nn.Linear(4, 2)
        self.flat = flat

    def forward(self, x: Any) -> Any:
        h = self.body(x).tanh()
        h = h.flatten() if self.flat else h
        return self.head(h.view(-1, 4)), h


def asked(model: Any, *, by: str) -> list[float | None]:
    """Train with gradients by the features; return these, weights and gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[float | None] = []
    seen: list[torch.Tensor] = []

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(gradient)
        return 2 * gradient

    for _ in range(3):
        output = model(X)
        scores, h = output if isinstance(output, tuple) else (output.scores, output.h)
        if by == "hook":
            h.register_hook(hook)
        elif by == "retain":
            h.retain_grad()
        loss = scores.square().mean() + h.mean()
        if by == "grad":
            seen += torch.autograd.grad(loss, [h, model.head.weight], retain_graph=True)
        optimizer.zero_grad()
        if by == "inputs":
            loss.backward(inputs=[h, *model.parameters()])
        else:
            loss.backward()
        optimizer.step()
        if by in ("retain", "inputs"):
            seen.append(h.grad)
        found += [weight.sum().item() for weight in model.parameters()]
        found += [grad.square().sum().item() for grad in seen]
    return found


@pytest.mark.parametrize("by", ["grad", "hook", "inputs", "retain"])
def test_gradients_by_an_output_come_through_others_too(by: str) -> None:
    found, outcome = compiled(asked, seeded(Features), by=by)
    close(found, asked(seeded(Features), by=by))
    assert outcome.state is State.SKIPPED
    assert "test_compile_repeated.py" in outcome.reason


def test_a_view_that_the_script_makes_of_an_output_lacks_nothing() -> None:
    class Given(nn.Module):
        """Returns a part of what it got, too."""

        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x: Any) -> Any:
            return self.network(x), x[:, :2]

    def hooked(model: Any) -> list[float | None]:
        scores, _ = model(X)
        found: list[torch.Tensor] = []
        scores[:, -1].register_hook(found.append)
        scores.square().mean().backward()
        return [weight.grad.sum().item() for weight in model.parameters()]

    found, outcome = compiled(hooked, Given())
    close(found, hooked(Given()))
    assert outcome.state is State.APPLIED


@dataclass
class Both:
    """What a model returns in an object, which is cast outside of its graphs."""

    scores: Any
    h: Any


class Low(Features):
    """Returns its features in bf16: in a tuple, behind a graph break, or in an object."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Any) -> Any:
        h = self.body(x).relu()
        if self.way == "break":
            torch._dynamo.graph_break()
        scores = self.head(h)
        return Both(scores, h) if self.way == "object" else (scores, h)


LOW = [("tuple", "grad"), ("break", "hook"), ("object", "grad")]
LATER = [("tuple", "hook"), ("tuple", "inputs"), ("tuple", "retain"), ("break", "grad")]
LATER += [("object", "hook")]


@pytest.mark.parametrize(
    ("kind", "by"), [*LOW, *[pytest.param(*one, marks=pytest.mark.matrix) for one in LATER]]
)
def test_gradients_by_a_low_precision_output_come_through_others_too(kind: str, by: str) -> None:
    with rig(amp="bfloat16"):
        expected = asked(seeded(Low, way=kind), by=by)
    with backend("aot_eager"), rig(compile="default", amp="bfloat16") as runtime:
        close(asked(seeded(Low, way=kind), by=by), expected)
        assert runtime.outcomes()["compile"].counts["graphs"]
        assert runtime.outcomes()["amp"].state is State.APPLIED


def test_a_hook_on_an_output_that_the_loss_does_not_use_is_not_called() -> None:
    def hooked(model: Any) -> list[float | None]:
        one, two = model(X)
        one.register_hook(lambda gradient: 2 * gradient)
        two.square().mean().backward()
        return [model.body[0].weight.grad.sum().item()]

    found, _ = compiled(hooked, seeded(Heads))
    close(found, hooked(seeded(Heads)))


def test_outputs_that_nobody_asks_by_stay_compiled() -> None:
    found, outcome = compiled(asked, seeded(Features), by="nothing")
    close(found, asked(seeded(Features), by="nothing"))
    assert outcome.state is State.APPLIED


def test_gradients_by_a_view_that_lack_something_are_reported() -> None:
    _, outcome = compiled(asked, seeded(Features, flat=True), by="retain")
    assert outcome.state is State.SKIPPED


def jacobians(model: Any, *, by: str) -> list[float | None]:
    """Take one derivative for each output, with what the first lines of a script have imported."""
    torch.manual_seed(1)
    x = X.clone().requires_grad_()
    y = model(x)
    rows = torch.eye(4)[:, None].expand(4, 3, 4)
    if by == "vmap":
        found = torch.vmap(lambda row: grad(y, x, row, retain_graph=True)[0])(rows)
    else:
        (found,) = grad(y, x, rows, retain_graph=True, is_grads_batched=True)
    y.sum().backward()
    return [*found.flatten().tolist(), *x.grad.flatten().tolist()]


@pytest.mark.parametrize("by", ["vmap", "is_grads_batched"])
def test_batches_of_gradients_are_taken_as_without_compilation(by: str) -> None:
    def model() -> nn.Module:
        return nn.Sequential(network(), nn.Dropout())

    found, outcome = compiled(jacobians, model(), by=by)
    close(found, jacobians(model(), by=by))
    assert outcome.state is State.SKIPPED
    assert "test_compile_repeated.py" in outcome.reason


class Doubling(nn.Module):
    """Changes a buffer in place, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Any) -> Any:
        self.factor.mul_(2)
        return self.one(x) * self.factor, self.norm(self.two(x)) * self.factor


def passes(model: Any) -> list[float | None]:
    x = torch.arange(12.0).view(6, 2) / 10
    for output in model(x):
        output.square().sum().backward()
    return [weight.grad.sum().item() for weight in model.parameters()]


def test_a_call_that_is_made_again_begins_with_the_buffers_that_it_began_with() -> None:
    found, outcome = compiled(passes, seeded(Doubling))
    close(found, passes(seeded(Doubling)))
    assert outcome.state is State.SKIPPED
