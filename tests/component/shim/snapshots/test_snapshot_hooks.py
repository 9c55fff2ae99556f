"""Hooks on gradients are called in a replay as often as they were, and read what they read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fasttrain.shim.levers.compile.slots import watch_hooks
from fasttrain.shim.levers.loss_scaling.lever import GradientHooks as ScaledHooks
from fasttrain.shim.snapshots.scalar_reads import REGISTRATIONS, GradientHooks
from support.preempted import data, loss_of, network

Tick = Callable[[], None]
Note = Callable[..., None]


def module_hook(model: nn.Sequential, note: Note) -> None:
    model[1].register_full_backward_hook(note)


def hook_before_a_module(model: nn.Sequential, note: Note) -> None:
    model[2].register_full_backward_pre_hook(note)


def parameter_hook(model: nn.Sequential, note: Note) -> None:
    model[0].weight.register_hook(note)  # type: ignore[operator]


def hook_behind_accumulation(model: nn.Sequential, note: Note) -> None:
    weight = model[2].weight
    assert isinstance(weight, Tensor)
    weight.register_post_accumulate_grad_hook(lambda p: note(p.grad))


def hook_inside_of_the_model(model: nn.Sequential, note: Note) -> None:
    class Noting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(note)
            return x

    model.insert(1, Noting())


def hook_on_several(model: nn.Sequential, note: Note) -> None:
    torch.autograd.graph.register_multi_grad_hook(tuple(model.parameters()), note)


def noting(tick: Tick, register: Any) -> Any:
    """Count the hooks, collect the numbers that they read, and go by them."""
    model, counts, norms = network(), {"calls": 0, "large": 0}, []

    def note(*found: Any) -> None:
        gradients = torch.cat([g.flatten() for g in tensors(found)])
        counts["calls"] += 1
        norms.append(gradients.norm().item())
        if gradients.abs().max() > 0.05:
            counts["large"] += 1

    register(model, note)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(2):
        for x, y in DataLoader(data(), 8, shuffle=True):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            tick()
    assert counts["calls"] >= 16
    return model.state_dict(), counts, norms


def tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, list | tuple):
        return [tensor for part in found for tensor in tensors(part)]
    return []


@pytest.mark.parametrize(
    "register",
    [
        module_hook,
        hook_before_a_module,
        parameter_hook,
        hook_behind_accumulation,
        hook_inside_of_the_model,
        hook_on_several,
    ],
)
def test_what_hooks_collect_is_what_they_would_have(preempted: Any, register: Any) -> None:
    assert preempted.differ(lambda tick: noting(tick, register), 11) == []


def test_a_hook_on_what_the_loop_makes_from_its_second_epoch_on(preempted: Any) -> None:
    def loop(tick: Tick) -> Any:
        model, norms = network(), []
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for epoch in range(3):
            for x, y in DataLoader(data(), 8, shuffle=True):
                optimizer.zero_grad()
                loss = loss_of(model, x, y)
                if epoch:
                    loss.register_hook(lambda g: norms.append(g.item()))
                loss.backward()
                optimizer.step()
                tick()
        assert len(norms) == 16
        return model.state_dict(), norms

    assert preempted.differ(loop, 20) == []


def adversarial(tick: Tick) -> Any:
    model, norms = network(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in DataLoader(data(), 8, shuffle=True):
        delta = torch.zeros_like(x, requires_grad=True)
        loss_of(model, x + delta, y).backward()
        assert delta.grad is not None
        norms.append(delta.grad.norm().item())
        optimizer.zero_grad()
        loss_of(model, x + 0.1 * delta.grad.sign(), y).backward()
        optimizer.step()
        tick()
    return model.state_dict(), norms


def keeping(tick: Tick) -> Any:
    model, norms = network(), []
    w = torch.ones(4, requires_grad=True)  # trained by hand
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in DataLoader(data(), 8, shuffle=True):
        h = x * w
        h.retain_grad()
        optimizer.zero_grad()
        loss_of(model, h, y).backward()
        optimizer.step()
        assert h.grad is not None
        norms.append(h.grad.norm().item())
        with torch.no_grad():
            w -= 0.1 * w.grad  # type: ignore[operator]
            w.grad = None
        tick()
    return model.state_dict(), w.detach(), norms


@pytest.mark.parametrize("loop", [adversarial, keeping])
def test_gradients_of_tensors_beside_parameters(preempted: Any, loop: Any) -> None:
    assert preempted.differ(loop, 5) == []


class Signs(torch.optim.Optimizer):
    """Relies on the gradients of all parameters, and changes them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad.add_(parameter, alpha=0.1)
            average = self.state[parameter].setdefault("average", torch.zeros_like(gradient))
            parameter.sub_(average.lerp_(gradient, 0.5).sign(), alpha=0.01)


class SignsOfSgd(torch.optim.SGD):
    """Changes the gradients of a step of torch's."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.sign_()
        return super().step(closure)


def clipped(parameters: Any) -> torch.optim.Optimizer:
    made = torch.optim.SGD(parameters, 0.1, momentum=0.9)

    def clip(optimizer: Any, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.clamp_(-0.1, 0.1)

    made.register_step_pre_hook(clip)
    made.register_step_post_hook(clip)
    return made


@pytest.mark.parametrize("make", [Signs, lambda p: SignsOfSgd(p, 0.1), clipped])
def test_steps_that_rely_on_gradients(preempted: Any, make: Any) -> None:
    def loop(tick: Tick) -> Any:
        model, losses = network(), []
        optimizer = make(model.parameters())
        for _ in range(2):
            for x, y in DataLoader(data(), 8, shuffle=True):
                optimizer.zero_grad()
                loss = loss_of(model, x, y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                tick()
        return model.state_dict(), optimizer.state_dict(), losses

    assert preempted.differ(loop, 11) == []


class Heads(nn.Module):
    """Has a head that no loss reaches, and one that only later epochs train."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second, self.unused = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        body = self.body(x).relu()
        return self.first(body), self.second(body)


@pytest.mark.parametrize("momentum", [0, 0.9])
def test_parameters_that_no_loss_reaches_have_no_gradients(preempted: Any, momentum: float) -> None:
    def loop(tick: Tick) -> Any:
        model, norms = Heads(), []
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)
        for epoch in range(3):
            for x, y in DataLoader(data(), 8, shuffle=True):
                first, second = model(x)
                optimizer.zero_grad()
                ((second if epoch == 2 else first).sum(1) - y).square().mean().backward()
                if epoch < 2:
                    grads = [p.grad for p in model.parameters() if p.grad is not None]
                    norms += [g.norm().item() for g in grads]
                else:
                    weight = model.second.weight.grad
                    assert weight is not None
                    norms.append(weight.norm().item())
                optimizer.step()
                tick()
        return model.state_dict(), norms

    assert preempted.differ(loop, 12) == []


def test_a_parameter_that_was_trained_later_has_a_gradient(preempted: Any) -> None:
    def loop(tick: Tick) -> Any:
        model, norms = Heads(), []
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for epoch in range(3):
            for x, y in DataLoader(data(), 8, shuffle=True):
                optimizer.zero_grad()
                (model(x)[epoch > 0].sum(1) - y).square().mean().backward()
                if epoch:
                    weight = model.second.weight.grad
                    assert weight is not None
                    norms.append(weight.norm().item())
                optimizer.step()
                tick()
        return model.state_dict(), norms

    assert preempted.differ(loop, 20) == []


def test_gradients_that_are_asked_for_by_name(preempted: Any) -> None:
    """torch 2.13 takes a dictionary of inputs, and returns one."""

    def loop(tick: Tick) -> Any:
        model = network()
        named = dict(model.named_parameters())
        optimizer = torch.optim.SGD(named.values(), 0.1)
        for x, y in DataLoader(data(), 8, shuffle=True):
            found: Any = torch.autograd.grad(loss_of(model, x, y), named)  # type: ignore[call-overload]
            for name, parameter in named.items():
                parameter.grad = found[name]
            optimizer.step()
            tick()
        return model.state_dict()

    assert preempted.differ(loop, 4) == []


def stepping_inside(tick: Tick) -> None:
    model = network()
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], 0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, step=optimizer.step: step())
    for x, y in DataLoader(data(), 8):
        loss_of(model, x, y).backward()
        tick()


def test_steps_inside_the_backward_pass_are_refused_at_the_first(
    preempted: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    ticks: list[None] = []
    with pytest.raises(SystemExit) as end:
        preempted.attempt(lambda tick: stepping_inside(lambda: ticks.append(tick())), 0)
    assert end.value.code == 78
    assert "[snapshot-step-in-backward]" in capfd.readouterr().err
    assert ticks == []


def test_only_hooks_of_the_script_count() -> None:
    """Whichever levers follow registrations as well, above or beneath."""
    for levers_above in (False, True):
        with ExitStack() as undo:
            before = [getattr(owner, name) for owner, name in REGISTRATIONS]
            hooks = GradientHooks()
            if levers_above:
                hooks.install(undo)
            ScaledHooks().install(undo)
            watch_hooks(lambda *_: None, undo)
            if not levers_above:
                hooks.install(undo)
            model = network()
            by_torch = "p.register_hook(print); m.register_full_backward_hook(print)"
            place = f"{Path(torch.__file__).parent}/nn/parallel/of_torchs_own.py"
            names = {"p": model[0].weight, "m": model[0]}
            exec(compile(by_torch, place, "exec"), names)
            model.register_forward_hook(lambda *_: None)
            assert not hooks.there
            (model[0].weight.register_hook if levers_above else model.register_full_backward_hook)(
                print
            )
            assert hooks.there
        assert [getattr(owner, name) for owner, name in REGISTRATIONS] == before
