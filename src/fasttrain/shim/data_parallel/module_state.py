"""What a call leaves in the modules of a root: attributes, buffers and values of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from fasttrain.shim.roots import parameters_of

# Of the module itself; what is in them is looked at by itself
_SLOTS = frozenset({"_parameters", "_buffers", "_modules"})
_SUMMED = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
Place = tuple[int, str]  # the number of a module in the order of `Module.modules`, and a name


class ModuleState:
    """Attributes and buffers of a root's modules at one moment.

    Attributes:
        parts: The modules.
    """

    def __init__(self, module: Module) -> None:
        self.parts = list(Module.modules(module))
        self._attributes = [dict(vars(part)) for part in self.parts]
        self._slots = [dict(part._buffers) for part in self.parts]
        with torch.no_grad():
            self._values = [{k: _clone(b) for k, b in slot.items()} for slot in self._slots]

    def left(self) -> dict[Place, Any]:
        """Return the attributes that are others now, and buffers that are others or changed."""
        found: dict[Place, Any] = {}
        for number, part in enumerate(self.parts):
            before = self._attributes[number]
            for name, value in vars(part).items():
                if name not in _SLOTS and before.get(name, _SLOTS) is not value:
                    found[number, name] = value
            values = self._values[number]
            for name, buffer in part._buffers.items():
                if not _alike(buffer, values.get(name)):
                    found[number, name] = buffer
        return found

    def begin(self) -> None:
        """Put the attributes back, and copies of the buffers in their places.

        The buffers themselves are left as they are: autograd graphs may need them.
        """
        for part, attributes, values in zip(
            self.parts, self._attributes, self._values, strict=True
        ):
            _set(vars(part), attributes)
            with torch.no_grad():
                _set(part._buffers, {name: _clone(value) for name, value in values.items()})

    def put(self) -> None:
        """Put attributes and buffers in their places as they were, for good."""
        for part, attributes, slot in zip(self.parts, self._attributes, self._slots, strict=True):
            _set(vars(part), attributes)
            _set(part._buffers, slot)


def parameter_sums(module: Module) -> list[float]:
    """Return numbers by which a change of any parameter shows.

    Versions don't count what is written through ``.data``, as an ActNorm does that sets itself up
    by its first batch. A copy of all parameters would need their memory once more.
    """
    known = [_own_part(p) for p in parameters_of(module) if not is_lazy(p)]
    with torch.no_grad():
        sums = [told for part in known for told in (part.sum(), torch.linalg.vector_norm(part))]
        found: list[float] = [float(number.real) for number in _to_cpu(sums)]
    return [0.0 if number != number else number for number in found]  # NaN is no other than NaN


def _to_cpu(numbers: list[Tensor]) -> list[Any]:
    """Return numbers of any dtype and device, with one copy for each device."""
    alike: dict[Any, list[int]] = {}
    for index, number in enumerate(numbers):
        alike.setdefault((number.device, number.dtype), []).append(index)
    found: list[Any] = [0.0] * len(numbers)
    for places in alike.values():
        values = torch.stack([numbers[index] for index in places]).tolist()
        for index, value in zip(places, values, strict=True):
            found[index] = value
    return found


def _own_part(parameter: Tensor) -> Tensor:
    """Return what this process has of a parameter, in a dtype that sums and norms are made of."""
    values: Any = parameter.detach()
    if hasattr(values, "to_local"):
        values = values.to_local()
    if values.layout != torch.strided:
        values = values.coalesce().values()
    wide = values.is_complex() or values.dtype in _SUMMED
    plain: Tensor = values if wide else values.float()
    return plain


def _set(slot: dict[str, Any], values: dict[str, Any]) -> None:
    for name in slot.keys() - values.keys():
        del slot[name]
    slot.update(values)


def _clone(buffer: Tensor | None) -> Tensor | None:
    return buffer if buffer is None or is_lazy(buffer) else buffer.detach().clone()


def _alike(buffer: Tensor | None, before: Tensor | None) -> bool:
    if buffer is None or before is None or is_lazy(buffer):
        return buffer is before
    same = buffer.shape == before.shape and buffer.dtype == before.dtype
    return same and torch.equal(buffer, before)
