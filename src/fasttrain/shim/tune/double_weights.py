"""Puts fp64 copies in the place of a module's parameters and buffers, to run the module in fp64.

The module itself runs and not a copy of it: closures, hooks and objects that keep its parts compute
by the same numbers as its layers. What keeps a parameter by itself, such as a closure or a view,
uses that parameter, whose numbers operators widen exactly; its gradient is a part of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter


class DoubleWeights:
    """Copies of a module's parameters in fp64, which hold every bit of fp32 numbers.

    Args:
        module: The module, which stays as it is until they are put in place.
    """

    def __init__(self, module: Module) -> None:
        self._parts = list(Module.modules(module))
        kept = (p for part in self._parts for p in part._parameters.values() if p is not None)
        self._copies = {id(p): (p, _copied(p)) for p in kept}
        self._behind = {id(copied): original for original, copied in self._copies.values()}

    def pairs(self) -> Sequence[tuple[Parameter, Parameter]]:
        """Return each parameter of the module with its copy."""
        return list(self._copies.values())

    def behind(self, parameter: Tensor) -> Parameter | None:
        """Return the parameter in whose place this one stands; None if it is no copy."""
        return self._behind.get(id(parameter))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the module use the copies in the block, and copies of its buffers, made now."""
        made: dict[int, Tensor] = {one: copied for one, (_, copied) in self._copies.items()}
        undo: list[tuple[Any, Any, Any]] = []

        def put(where: Any, key: Any, value: Any) -> None:
            undo.append((where, key, where[key]))
            where[key] = value

        try:
            for part in self._parts:
                for name, buffer in list(part._buffers.items()):
                    if buffer is not None:
                        put(part._buffers, name, made.setdefault(id(buffer), _widened(buffer)))
                for name, parameter in list(part._parameters.items()):
                    if id(parameter) in made:
                        put(part._parameters, name, made[id(parameter)])
            yield
        finally:
            for where, key, before in reversed(undo):
                where[key] = before


def _copied(parameter: Parameter) -> Parameter:
    copied = Parameter(_widened(parameter), requires_grad=parameter.requires_grad)
    vars(copied).update(vars(parameter))
    return copied


@torch.no_grad()
def _widened(tensor: Tensor) -> Tensor:
    return widened(tensor.detach().clone())


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor with its real or complex numbers in fp64; integers stay as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor
