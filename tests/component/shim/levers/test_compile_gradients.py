"""Gradients are taken out of memory that the next replay overwrites, unless the script has them."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from fasttrain.shim.levers.compile.graph_memory import Gradients


class Loop:
    """A loop of one parameter, whose gradients are given; those of replays lie in one memory."""

    def __init__(self) -> None:
        self.parameter = nn.Parameter(torch.ones(2))
        self.optimizer = SGD([self.parameter], lr=0.1)
        self.gradients = Gradients()
        self.memory = torch.zeros(2)

    def call(self, *, replay: bool) -> bool:
        released = self.gradients.release([self.parameter], replay=replay)
        if released and replay:
            self.memory.fill_(torch.nan)
        return released

    def backward(self, value: float, *, replay: bool) -> None:
        """Do as autograd does: take a first gradient over, add others to it."""
        new = self.memory.fill_(value).detach() if replay else torch.full((2,), value)
        if self.parameter.grad is None:
            self.parameter.grad = new
        else:
            self.parameter.grad += new

    def step(self) -> bool:
        return self.gradients.note(self.optimizer)

    def begin(self) -> None:
        """Make a step without and one with a replay, in the usual order."""
        for replay in (False, True):
            self.optimizer.zero_grad()
            assert self.call(replay=replay)
            self.backward(1.0, replay=replay)
            assert self.step()

    @property
    def gradient(self) -> Any:
        return self.parameter.grad


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_a_gradient_outlives_the_next_replay(loop: Loop) -> None:
    loop.begin()
    assert loop.call(replay=True)
    assert loop.gradient.tolist() == [1, 1]
    loop.backward(2.0, replay=True)
    assert loop.gradient.tolist() == [3, 3]


def test_a_gradient_in_its_own_memory_is_not_copied(loop: Loop) -> None:
    loop.call(replay=False)
    loop.backward(1.0, replay=False)
    first = weakref.ref(loop.gradient)
    for _ in range(3):
        loop.step()
        loop.optimizer.zero_grad(set_to_none=False)
        assert loop.call(replay=True)
        assert loop.gradient is first()
        loop.backward(2.0, replay=True)
        assert loop.gradient.tolist() == [2, 2]


def test_a_gradient_is_copied_once(loop: Loop) -> None:
    loop.begin()
    assert loop.call(replay=True)
    copied = weakref.ref(loop.gradient)
    loop.backward(1.0, replay=True)
    loop.step()
    assert loop.call(replay=True)
    assert loop.gradient is copied()


@pytest.mark.parametrize("zeroed", [False, True])
def test_a_gradient_that_the_script_holds_stays_its_own(loop: Loop, zeroed: bool) -> None:
    loop.begin()
    held = loop.gradient
    if zeroed:
        loop.optimizer.zero_grad()
    assert not loop.call(replay=True)
    assert zeroed or loop.gradient is held
    assert held.tolist() == [1, 1]


@pytest.mark.parametrize("alias", [torch.Tensor.detach, lambda g: g[:1]])
def test_memory_of_a_gradient_that_the_script_holds_is_noticed(loop: Loop, alias: Any) -> None:
    loop.call(replay=False)
    loop.backward(1.0, replay=False)
    held = alias(loop.gradient)
    loop.step()
    loop.optimizer.zero_grad()
    assert not loop.call(replay=False)
    assert held is not None


def test_steps_of_other_parameters_are_none_of_the_root() -> None:
    loop = Loop()
    loop.call(replay=False)
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    assert not loop.gradients.note(SGD([other], lr=0.1))
    assert not loop.step()  # the root's has no gradient
    assert loop.call(replay=False)


def test_nothing_is_kept_alive(loop: Loop) -> None:
    loop.begin()
    assert loop.call(replay=True)
    loop.step()
    gradient = weakref.ref(loop.gradient)
    loop.optimizer.zero_grad()
    assert gradient() is None
