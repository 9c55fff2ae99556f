"""Gradients by tensors that a root computed in low precision and the script was given in fp32.

Numbers are small integers times a power of two, which low precision hardly rounds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasttrain.shim.hooks import gradients

AGAIN = True  # not as a literal keyword, by which compilation is left off for a whole process
X = torch.tensor([[1.0, -2.0], [3.0, 1.0]])
SMALL = 2.0**-10  # times 2 ** 16, by which fp16 is scaled, it is still no overflow


class Net(nn.Module):
    """Returns its features beside what it makes of them, and keeps them."""

    def __init__(self, *, retain: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.first.weight.copy_(torch.tensor([[1.0, 2.0], [-1.0, 3.0]]))
            self.second.weight.copy_(torch.tensor([[2.0, 1.0], [1.0, -1.0]]))
        self.retain = retain

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.features = self.first(x)
        if self.retain:
            self.features.retain_grad()
        return self.second(self.features), self.features


def by_output(model: Net, h: Tensor) -> Tensor:
    return h


def by_attribute(model: Net, _: Tensor) -> Tensor:
    return model.features


def in_both(rig: Any, amp: str, act: Callable[[], Any]) -> None:
    """Hold what ``act`` gives in low precision against plain torch."""
    expected = act()
    with rig(amp=amp) as runtime:
        found = act()
        assert runtime.outcomes()["amp"].state == "applied"
    assert len(found) == len(expected) > 0
    for new, old in zip(found, expected, strict=True):
        torch.testing.assert_close(new, old, rtol=0.01, atol=0.0)


LOW = pytest.mark.parametrize("amp", ["bfloat16", "float16"])
PLACES = pytest.mark.parametrize("place", [by_output, by_attribute])


@LOW
@PLACES
def test_a_gradient_by_features(rig: Any, amp: str, place: Any) -> None:
    def act() -> list[Any]:
        model = Net()
        out, h = model(X)
        f = place(model, h)
        alone = torch.autograd.grad(out.sum(), f, retain_graph=True)
        both = torch.autograd.grad(out.sum() + 3 * f.sum(), [f, model.first.weight])
        return [*alone, *both]

    in_both(rig, amp, act)


@LOW
@PLACES
def test_a_penalty_on_the_gradient_by_features(rig: Any, amp: str, place: Any) -> None:
    def act() -> list[Any]:
        model = Net()
        out, h = model(X)
        (g,) = torch.autograd.grad(SMALL * out.square().sum(), place(model, h), create_graph=AGAIN)
        g.square().sum().backward()
        return [g, model.first.weight.grad, model.second.weight.grad]

    in_both(rig, amp, act)


@LOW
@PLACES
def test_a_hook_on_features(rig: Any, amp: str, place: Any) -> None:
    def act() -> list[Any]:
        model, seen = Net(), []
        out, h = model(X)
        f = place(model, h)
        f.register_hook(lambda g: seen.append(g.clone()))
        f.register_hook(lambda g: 2 * g)
        removed = f.register_hook(lambda g: 5 * g)
        removed.remove()
        f.register_hook(lambda g: g.add_(SMALL))  # against torch's advice
        (SMALL * out.sum()).backward(retain_graph=True)
        (SMALL * (out.sum() + f.sum())).backward()
        return [*seen, model.first.weight.grad]

    in_both(rig, amp, act)


@LOW
@PLACES
@pytest.mark.parametrize("retain", ["the script", "the model"])
def test_features_that_keep_their_gradient(rig: Any, amp: str, place: Any, retain: str) -> None:
    def act() -> list[Any]:
        model, found = Net(retain=retain == "the model"), []
        out, h = model(X)
        f = place(model, h)
        if retain == "the script":
            f.retain_grad()
            f.retain_grad()
        for loss in (out.sum(), out.sum() + 3 * f.sum(), f.sum()):
            (SMALL * loss).backward(retain_graph=True)
            found.append(f.grad)
        f.grad = None
        (SMALL * (out.sum() - 4 * f.sum())).backward()
        return [*found, f.grad]

    in_both(rig, amp, act)


@PLACES
@pytest.mark.parametrize("others", [False, True])
def test_gradients_left_on_features_alone(rig: Any, place: Any, *, others: bool) -> None:
    def act() -> list[Any]:
        model = Net()
        out, h = model(X)
        f = place(model, h)
        inputs = [model.second.weight, f] if others else [f]
        for _ in range(2):
            (out.sum() + f.sum()).backward(inputs=inputs, retain_graph=True)
        return [f.grad, model.second.weight.grad, model.first.weight.grad]

    in_both(rig, "bfloat16", act)


def test_all_that_torch_can_be_asked_for(rig: Any) -> None:
    def act() -> list[Any]:
        model, unused = Net(), torch.ones(2, requires_grad=True)
        out, h = model(X)
        loss = out.sum()
        named: Any = torch.autograd.grad(loss, {"h": h}, retain_graph=True)  # type: ignore[call-overload]
        zeros = torch.autograd.grad(unused.sum(), [h, unused], materialize_grads=True)
        none = torch.autograd.grad(unused.sum() + loss, [h, unused], allow_unused=True)
        out, h = model(X)
        each = torch.autograd.grad(out.view(-1), h, torch.eye(4).view(4, 4), is_grads_batched=True)
        with pytest.raises(RuntimeError, match="index 0 appears to not have been used"):
            torch.autograd.grad(unused.sum(), h)
        return [named["h"], *zeros, *none, *each]

    in_both(rig, "bfloat16", act)


def test_what_comes_by_the_cast_alone_is_not_rounded(rig: Any) -> None:
    with rig(amp="bfloat16"):
        out, _ = Net()(X)
        seen: list[Tensor] = []
        out.register_hook(seen.append)
        out.retain_grad()
        (out * torch.pi).sum().backward()
        expected = torch.full((2, 2), torch.pi)
        assert torch.equal(seen[0], expected)
        assert torch.equal(out.grad, expected)  # type: ignore[arg-type]


def test_features_changed_in_place_are_others(rig: Any) -> None:
    def act() -> list[Any]:
        model = Net()
        out, h = model(X)
        h.mul_(2)
        return [torch.autograd.grad(out.sum() + h.sum(), h)[0]]

    in_both(rig, "bfloat16", act)


def test_no_graph_is_kept_alive(rig: Any) -> None:
    def live() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    def once(model: Net) -> None:
        out, h = model(X)
        h.register_hook(lambda g: None)
        h.retain_grad()
        torch.autograd.grad(out.sum(), h, retain_graph=True)
        out.sum().backward()
        model.features = torch.zeros(0)
        model.zero_grad()

    with rig(amp="bfloat16"):
        model = Net()
        once(model)
        before = live()
        once(model)
        assert live() <= before  # less, if something of an earlier test was let go of meanwhile


def test_torchs_own_are_back(rig: Any) -> None:
    def own() -> list[Any]:
        return [Tensor.register_hook, Tensor.retain_grad, torch.autograd._engine_run_backward]  # type: ignore[attr-defined]

    before = own()
    with rig(amp="float16"):
        assert not any(a is b for a, b in zip(own(), before, strict=True))
    assert own() == before
    assert "retain_grad" not in vars(Tensor)


def test_what_is_not_low_stays_itself() -> None:
    tensor = torch.ones(2, requires_grad=True) * 2
    assert gradients.lift(tensor) is tensor
    assert not gradients.is_lifted(tensor)
