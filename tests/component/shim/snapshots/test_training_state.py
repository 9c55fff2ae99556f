"""Whether the script trains or evaluates, told from its optimizers and modules."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from fasttrain.shim.hooks.loop import IN_EVAL, NO_GRADIENTS, NO_OPTIMIZER, TrainingState
from fasttrain.shim.hooks.roots import RootCalls


@pytest.fixture
def state() -> Iterator[TrainingState]:
    with ExitStack() as undo:
        roots = RootCalls()
        state = TrainingState(roots)
        state.install(undo)
        roots.install(undo)
        yield state


def called(model: nn.Linear) -> nn.Linear:
    """Let a model be met as a root."""
    model(torch.ones(1, model.in_features))
    return model


def test_why_a_loader_does_not_feed_training(state: TrainingState) -> None:
    model = called(nn.Linear(2, 1))
    assert state.why_not_training() == NO_OPTIMIZER
    optimizer = SGD(model.parameters(), lr=0.1)
    assert state.why_not_training() == ""
    with torch.no_grad():
        assert state.why_not_training() == NO_GRADIENTS
    model.eval()
    assert state.why_not_training() == IN_EVAL
    model.train()
    assert state.why_not_training() == ""
    assert state.trained() == {id(p) for group in optimizer.param_groups for p in group["params"]}


def test_a_frozen_teacher_in_eval_mode_does_not_decide(state: TrainingState) -> None:
    teacher, student = called(nn.Linear(2, 1)).eval(), called(nn.Linear(2, 1))
    optimizer = SGD(student.parameters(), lr=0.1)
    assert state.why_not_training() == ""
    student.eval()
    teacher.train()
    assert state.why_not_training() == IN_EVAL
    del optimizer


def test_one_of_two_trained_models_in_train_mode_is_enough(state: TrainingState) -> None:
    maker, judge = called(nn.Linear(2, 1)), called(nn.Linear(2, 1))
    optimizers = [SGD(model.parameters(), lr=0.1) for model in (maker, judge)]
    judge.eval()
    assert state.why_not_training() == ""
    maker.eval()
    assert state.why_not_training() == IN_EVAL
    assert state.optimizers == optimizers


def test_optimizers_come_in_their_order_and_are_not_kept_alive(state: TrainingState) -> None:
    model = nn.Linear(2, 1)
    made = [kind(model.parameters(), lr=0.1) for kind in (SGD, Adam, SGD)]
    made[1].add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert [id(o) for o in state.optimizers] == [id(o) for o in made]
    assert [len(group["params"]) for group in state.groups()] == [2, 2, 1, 2]
    del made[1]
    gc.collect()
    assert [type(o) for o in state.optimizers] == [SGD, SGD]


def test_gradients_that_are_cleared_are_heard_of(state: TrainingState) -> None:
    heard: list[str] = []
    state.on_zero_grad.append(lambda: heard.append("cleared"))
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    model.zero_grad()
    optimizer.step()
    assert heard == ["cleared", "cleared"]


def test_torch_is_put_back() -> None:
    before = (Optimizer.__init__, Optimizer.zero_grad, nn.Module.train, nn.Module.zero_grad)
    with ExitStack() as undo:
        TrainingState(RootCalls()).install(undo)
        assert Optimizer.__init__ is not before[0]
    after = (Optimizer.__init__, Optimizer.zero_grad, nn.Module.train, nn.Module.zero_grad)
    assert after == before
