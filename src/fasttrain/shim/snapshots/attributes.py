"""What modules and optimizers keep beside what torch has them keep."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from fasttrain.shim.snapshots.contents import merged
from fasttrain.shim.snapshots.plain import UnplainError, packed

_TORCHS = frozenset(vars(Module())) | frozenset(vars(Optimizer([torch.empty(0)], {})))


def plain_attributes(owner: Module | Optimizer) -> dict[str, Any]:
    """Give numbers, words and tensors, and containers of them, by name."""
    return {name: value for name, value in _own(owner) if _is_plain(value)}


def other_attributes(owner: Module | Optimizer) -> Iterator[tuple[str, Any]]:
    """Give the rest with their names: objects of the script's own, which may hold tensors."""
    return ((name, value) for name, value in _own(owner) if not _is_plain(value))


def set_attributes(owner: Module | Optimizer, saved: dict[str, Any]) -> None:
    """Put back what `plain_attributes` gave; a tensor that an optimizer may train stays the one."""
    for name, value in saved.items():
        vars(owner)[name] = merged(vars(owner).get(name), value)


def _own(owner: Module | Optimizer) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(owner).items() if name not in _TORCHS)


def _is_plain(value: Any) -> bool:
    try:
        packed(value)
    except UnplainError:
        return False
    return not _holds_parameter(value)


def _holds_parameter(value: Any) -> bool:
    """Whether a parameter is in it, which is kept with its module."""
    if isinstance(value, dict):
        return any(map(_holds_parameter, value.values()))
    if isinstance(value, list | tuple | deque):
        return any(map(_holds_parameter, value))
    return isinstance(value, Parameter)
