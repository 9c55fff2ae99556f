"""Makes a step of a copy of an optimizer, with copies of its parameters, gradients and state."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from fasttrain.shim.tune.distances import Results, Tensors

AroundStep = Callable[[Optimizer], AbstractContextManager[Any]]
Cast = Callable[[Tensor], Tensor]
_COUNTER = "step"  # which fused kernels read in fp32, and others as it is
# An LR scheduler puts a method of the script's optimizer here: a copy of it would copy all of that.
_NOT_COPIED = "step"


def stepped(optimizer: Optimizer, around: AroundStep, cast: Cast) -> Results:
    """Return what a step makes of copies of an optimizer's parameters and state.

    Args:
        optimizer: The optimizer, whose parameters have gradients.
        around: Returns the context of the step of a copy, which it is called with.
        cast: Casts parameters, gradients and state.
    """
    copied = _copy_of(optimizer, cast)
    before = _groups(copied)
    with around(copied), torch.no_grad():
        _step_of(copied)(copied)
    return Results(_groups(copied), before)


def _step_of(optimizer: Optimizer) -> Any:
    """Return the optimizer's step without the hooks on all optimizers' steps, which would count it.

    Source: ``Optimizer.profile_hook_step`` of torch 2.13, which marks its wrapper as ``hooked``.
    """
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _copy_of(optimizer: Optimizer, cast: Cast) -> Optimizer:
    memo: dict[int, Any] = {}
    for parameter in _parameters(optimizer):
        memo[id(parameter)] = _parameter(parameter, cast)
    copied: Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            vars(copied)[name] = OrderedDict()
        elif name != _NOT_COPIED:
            vars(copied)[name] = copy.deepcopy(value, memo)
    for state in copied.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and name != _COUNTER:
                state[name] = cast(value)
    return copied


def _parameter(parameter: Tensor, cast: Cast) -> Tensor:
    value = cast(parameter.detach()).clone()
    copied = Parameter(value, parameter.requires_grad)
    if parameter.grad is not None:
        copied.grad = cast(parameter.grad.detach()).clone()
    return copied


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _groups(optimizer: Optimizer) -> dict[str, Tensors]:
    parameters = _parameters(optimizer)
    states = {
        f"{name} of parameter {at}": _on_host(value)
        for at, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }
    values = {str(at): p.detach().clone() for at, p in enumerate(parameters)}
    return {"parameter": values, "state": states}


def _on_host(value: Tensor) -> Tensor:
    """Return a copy; of one number, where any step counter can be compared with any other."""
    copied = value.detach().clone()
    return copied.cpu().double() if value.numel() == 1 else copied
