"""Modes and tensors of the script's that see what is computed see nothing of fasttrain's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

SEEN: list[str] = []


class Functions(TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        SEEN.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):  # type: ignore[misc]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        SEEN.append(str(func))
        return func(*args, **(kwargs or {}))


class Logged(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        SEEN.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


class Plain(torch.optim.Optimizer):
    """An optimizer of the script's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            assert isinstance(parameter.grad, Tensor)
            parameter.sub_(parameter.grad)


def under(mode: Any) -> None:
    with mode():
        steps(nn.Parameter(torch.ones(3)))


def steps(parameter: Tensor) -> None:
    optimizer = Plain([parameter], {})
    for _ in range(3):
        (parameter * 2).sum().backward()
        optimizer.step()


def passes_of_a_logged_loss() -> None:
    for _ in range(3):
        torch.ones(3, requires_grad=True).sum().as_subclass(Logged).backward()


@pytest.mark.parametrize(
    "run",
    [
        lambda: under(Functions),
        lambda: under(Operators),
        lambda: steps(torch.ones(3).as_subclass(Logged).requires_grad_()),
        passes_of_a_logged_loss,
    ],
    ids=["function mode", "dispatch mode", "parameter", "loss"],
)
def test_the_scripts_see_what_they_see_without_levers(rig: Any, run: Any) -> None:
    SEEN.clear()
    run()
    plain = list(SEEN)
    SEEN.clear()
    with rig(optimizer="fused", nan="warn"):
        run()
    assert plain == SEEN
