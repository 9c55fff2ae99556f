"""Gradients by tensors that a root computed in low precision and the script was given in fp32.

Numbers are small integers times a power of two, which low precision hardly rounds.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasttrain.shim import lifted

X = torch.tensor([[1.0, -2.0], [3.0, 1.0]])
SMALL = 2.0**-10  # times 2 ** 16, by which fp16 is scaled, it is still no overflow
GLOBAL: Any = None
GLOBALS: list[Any] = []


class Net(nn.Module):
    """Gives its features beside what it makes of them, and keeps them."""

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
        (g,) = torch.autograd.grad(SMALL * out.square().sum(), place(model, h), create_graph=True)
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
        assert live() == before


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
    assert lifted.lift(tensor) is tensor
    assert not lifted.is_lifted(tensor)


class Record:
    """An object of the script's that a forward is handed."""


class Leaving(nn.Module):
    """Leaves its features in one of many places."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.first, self.second = nn.Linear(2, 2), nn.Identity()
        self.memory: deque[Any] = deque(maxlen=2)

    def forward(self, x: Tensor, given: Any) -> Tensor:
        global GLOBAL
        h = self.first(x)
        if self.place == "of torch's module":
            self.second.h = h
        elif self.place == "tuple":
            self.h = (h, None)
        elif self.place == "deque":
            self.memory.append(h)
        elif self.place == "global":
            GLOBAL = h
        elif self.place == "list among globals":
            GLOBALS.append(h)
        elif isinstance(given, list):
            given.append(h)
        elif isinstance(given, dict):
            given["h"] = h
        else:
            given.h = h
        return self.second(h)


FOUND: dict[str, Callable[[Any, Any], Any]] = {
    "of torch's module": lambda model, _: model.second.h,
    "tuple": lambda model, _: model.h[0],
    "deque": lambda model, _: model.memory[-1],
    "global": lambda *_: GLOBAL,
    "list among globals": lambda *_: GLOBALS[-1],
    "list": lambda _, given: given[-1],
    "dict": lambda _, given: given["h"],
    "object": lambda _, given: given.h,
    "namespace": lambda _, given: given.h,
}
GIVEN = {"list": list, "dict": dict, "object": Record, "namespace": SimpleNamespace}


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("place", FOUND)
def test_features_left_anywhere_meet_fp32(rig: Any, place: str, *, by_name: bool) -> None:
    with rig(amp="bfloat16"):
        model = Leaving(place)
        for _ in range(5):  # more calls than are watched
            given = GIVEN.get(place, Record)()
            out = model(X, given=given) if by_name else model(X, given)
            h = FOUND[place](model, given)
            (h @ torch.ones(2, 3) + out.sum()).sum().backward()
    GLOBALS.clear()


def test_the_scripts_own_low_tensors_stay_low(rig: Any) -> None:
    own = [torch.ones(2, dtype=torch.bfloat16) for _ in range(4)]
    with rig(amp="bfloat16"):
        model: Any = Leaving("list")
        model.table, model.one = [own[0]], own[1]
        given, GLOBALS[:] = [own[2]], [own[3]]
        for _ in range(5):
            model(X, given)
    assert model.table[0] is own[0]
    assert model.one is own[1]
    assert given[0] is own[2]
    assert GLOBALS.pop() is own[3]
    assert {h.dtype for h in given[1:]} == {torch.float32}


def test_a_repeated_call_leaves_its_features_once(rig: Any) -> None:
    class Failing(Leaving):
        def forward(self, x: Tensor, given: Any) -> Tensor:
            GLOBALS.append(x)
            y = super().forward(x, given)
            torch.zeros(2, 2).index_add_(0, torch.tensor([0, 1]), y)
            return y

    with rig(amp="bfloat16") as runtime:
        given: list[Any] = []
        Failing("list")(X, given)
        assert runtime.outcomes()["amp"].state == "skipped"
    assert [h.dtype for h in given] == [torch.float32]
    assert len(GLOBALS) == 1
    GLOBALS.clear()
