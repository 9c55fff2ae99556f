"""What a call changes in a root's modules: attributes, buffers and values of parameters."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_, is_not
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from fasttrain.shim.data_parallel.tensor_sums import strided_parts, sums_of
from fasttrain.shim.hooks.containers import module_name, tensors_in
from fasttrain.shim.hooks.roots import is_sharded, parameters_of

# A module's own containers; their contents are compared separately.
_SLOTS = frozenset({"_parameters", "_buffers", "_modules"})
Place = tuple[int, str]  # the number of a module in the order of `Module.modules`, and a name
IN_DOUBLE = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)


class ModuleState:
    """Attributes and buffers of a root's modules at one moment.

    Attributes:
        parts: The modules.
    """

    def __init__(self, module: Module) -> None:
        self.parts = list(Module.modules(module))
        self._attributes = [dict(vars(part)) for part in self.parts]
        self._parameters = [dict(part._parameters) for part in self.parts]
        self._slots = [dict(part._buffers) for part in self.parts]
        with torch.no_grad():
            self._values = [{k: _clone(b) for k, b in slot.items()} for slot in self._slots]
        self._begun = [_versions_of(slot) for slot in self._slots]

    def left(self) -> dict[Place, Any]:
        """Return the attributes and buffers that were replaced or, for buffers, written to."""
        found: dict[Place, Any] = {}
        for number, part in enumerate(self.parts):
            before = self._attributes[number]
            for name, value in vars(part).items():
                if name not in _SLOTS and before.get(name, _SLOTS) is not value:
                    found[number, name] = value
            values, begun = self._values[number], self._begun[number]
            for name, buffer in part._buffers.items():
                # Also one that has the same values after it, such as a count of rare rows.
                written = _version_of(buffer) != begun.get(name)
                if written or not _alike(buffer, values.get(name)):
                    found[number, name] = buffer
        return found

    def has_grown(self, module: Module) -> bool:
        """True if the root has other modules or parameters now."""
        parts = list(Module.modules(module))
        if len(parts) != len(self.parts) or any(map(is_not, parts, self.parts)):
            return True
        held = zip(self.parts, self._parameters, strict=True)
        return any(part._parameters.keys() != before.keys() for part, before in held)

    def begin(self) -> None:
        """Restore the attributes, and put copies of the buffers' values in the buffers' places.

        The buffers themselves aren't written to: autograd graphs may need them.
        """
        for part, attributes, values in zip(
            self.parts, self._attributes, self._values, strict=True
        ):
            _set(vars(part), attributes)
            with torch.no_grad():
                _set(part._buffers, {name: _clone(value) for name, value in values.items()})
        self._begun = [_versions_of(part._buffers) for part in self.parts]

    @contextmanager
    def in_double(self, module: Module) -> Iterator[None]:
        """Put copies in fp64 in the places of parameters, and of buffers at each `begin`."""
        held = [(part, dict(part._parameters)) for part in Module.modules(module)]
        values = self._values
        copies: dict[int, Parameter] = {}

        def doubled(parameter: Parameter | None) -> Parameter | None:
            if parameter is None or parameter.dtype not in IN_DOUBLE:
                return parameter
            if id(parameter) not in copies:
                copy = parameter.detach().to(torch.float64)
                copies[id(parameter)] = Parameter(copy, parameter.requires_grad)
            return copies[id(parameter)]

        try:
            self._values = [{k: _in_double(b) for k, b in slot.items()} for slot in values]
            for part, slot in held:
                part._parameters.update({name: doubled(p) for name, p in slot.items()})
            yield
        finally:
            for part, slot in held:
                part._parameters.update(slot)
            self._values = values

    def put(self) -> None:
        """Restore the attributes and the buffers themselves."""
        for part, attributes, slot in zip(self.parts, self._attributes, self._slots, strict=True):
            _set(vars(part), attributes)
            _set(part._buffers, slot)


class Changes:
    """What a split call changes in its modules, and whether verified calls have changed that.

    Looked at are buffers, parameters, and attributes of modules but those of torch's own classes.

    Args:
        module: The root.
        changed: The attributes and buffers that such calls change.
        kept: The attributes among them in which they leave tensors; True if these have rows.
    """

    def __init__(
        self, module: Module, changed: Sequence[Place], kept: Mapping[Place, bool] | None = None
    ) -> None:
        self._changed, self._kept = frozenset(changed), kept or {}
        self._rows = {place for place, rows in self._kept.items() if rows}
        parts, numbers = list(Module.modules(module)), {number for number, _ in changed}
        self._parts: list[tuple[int, weakref.ref[Module]]] = []
        self._fixed: list[weakref.ref[Tensor]] = []
        for number, part in enumerate(parts):
            if number in numbers or not _is_torchs(part):
                self._parts.append((number, weakref.ref(part)))
            else:
                self._fixed += [weakref.ref(b) for b in part._buffers.values() if _is_counted(b)]
        if not is_sharded(module):
            self._fixed += [weakref.ref(p) for p in parameters_of(module) if _is_counted(p)]

    def hold(self) -> Held:
        """Return the present state, of which restorable buffers are copied."""
        held = Held(self._changed, self._kept, self._rows)
        for number, ref in self._parts:
            if (part := ref()) is not None:
                held.add(number, part)
        held.fixed += [t for ref in self._fixed if (t := ref()) is not None]
        held.copy()
        return held


_VERSION = operator.attrgetter("_version")  # in C: no Python frame per tensor
MOST_COPIED = 1 << 16  # numbers in a buffer that is copied though no verified call writes to it


class Held:
    """The state of a root's modules before a split call.

    Attributes:
        fixed: Tensors that can't be restored.
    """

    def __init__(
        self, changed: frozenset[Place], kept: Mapping[Place, bool], rows: set[Place]
    ) -> None:
        self.fixed: list[Tensor] = []
        self._changed, self._kept, self._rows = changed, kept, rows
        self._parts: list[tuple[int, Module, dict[str, Any], dict[str, Any]]] = []
        self._copied: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._versions: list[int] = []
        self._begun: list[dict[str, tuple[int, int]]] = []

    def add(self, number: int, part: Module) -> None:
        """Hold the attributes and buffers of a module, which has that number in its root."""
        buffers = part._buffers
        self._parts.append((number, part, vars(part).copy(), buffers.copy()))
        self._begun.append(_versions_of(buffers) if buffers else {})
        for name, buffer in buffers.items():
            if buffer is None or is_lazy(buffer):
                continue
            if (number, name) in self._changed or buffer.numel() <= MOST_COPIED:
                self._copied.append(buffer)
            elif _is_counted(buffer):
                self.fixed.append(buffer)

    def copy(self) -> None:
        """Copy the buffers."""
        self._versions = list(map(_VERSION, self.fixed))
        if not self._copied:
            return
        alike: dict[Any, list[Tensor]] = {}
        for buffer in self._copied:
            alike.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        self._copied = [buffer for same in alike.values() for buffer in same]
        with torch.no_grad():  # on a device by one kernel for all of a dtype
            self._copies = [c for same in alike.values() for c in torch._foreach_mul(same, 1)]

    def has_lost(self) -> bool:
        """True if the call has written to a tensor that can't be restored."""
        return self._versions != list(map(_VERSION, self.fixed))

    def is_foreseen(self) -> bool:
        """True if verified calls have changed all that the call has changed."""
        found: set[Place] = set()
        for (number, part, before, _), begun in zip(self._parts, self._begun, strict=True):
            now = vars(part)
            if len(now) != len(before) or not all(map(is_, now.values(), before.values())):
                for name, value in now.items():
                    if name in _SLOTS or before.get(name, _SLOTS) is value:
                        continue
                    found.add((number, name))
                    if (number, name) not in self._kept and tensors_in(value):
                        return False
            if begun and begun != (versions := _versions_of(part._buffers)):
                found |= {(number, n) for n, at in versions.items() if begun.get(n) != at}
        return found <= self._changed and self._rows <= found

    def buffers(self) -> list[Tensor]:
        """Return the buffers that such calls write to, but BatchNorm's, which sums over ranks."""
        return [
            buffer
            for number, part, *_ in self._parts
            for name, buffer in part._buffers.items()
            if (number, name) in self._changed
            and buffer is not None
            and not isinstance(part, _BatchNorm)
        ]

    def restore(self) -> None:
        """Restore attributes and buffers."""
        for _, part, attributes, buffers in self._parts:
            _set(vars(part), attributes)
            _set(part._buffers, buffers)
        for buffer, copy in zip(self._copied, self._copies, strict=True):
            # No new version of it: autograd graphs of other calls may hold it.
            buffer.data.copy_(copy)


def _is_torchs(part: Module) -> bool:
    """True if all classes of a module are torch's: FSDP and parametrizations make new ones."""
    return all(module_name(kind).startswith("torch.") for kind in type(part).__mro__[:-1])


def _is_counted(tensor: Tensor | None) -> TypeGuard[Tensor]:
    """True if a tensor counts what is written to it."""
    return tensor is not None and not is_lazy(tensor) and not tensor.is_inference()


def parameter_sums(module: Module) -> list[float]:
    """Return checksums of all parameters, or of this rank's shards.

    A copy to compare with would double the parameters' memory.
    """
    return sums_of([p for p in parameters_of(module) if not is_lazy(p)])


def _set(slot: dict[str, Any], values: dict[str, Any]) -> None:
    for name in slot.keys() - values.keys():
        del slot[name]
    slot.update(values)


def _in_double(buffer: Tensor | None) -> Tensor | None:
    if buffer is None or is_lazy(buffer):
        return buffer
    return buffer.to(IN_DOUBLE.get(buffer.dtype, buffer.dtype))


def _versions_of(slot: dict[str, Tensor | None]) -> dict[str, tuple[int, int]]:
    return {name: _version_of(tensor) for name, tensor in slot.items()}


def _version_of(tensor: Tensor | None) -> tuple[int, int]:
    """Return what is another one once a tensor has been replaced or written to."""
    return id(tensor), tensor._version if _is_counted(tensor) else 0


def _clone(buffer: Tensor | None) -> Tensor | None:
    return buffer if buffer is None or is_lazy(buffer) else buffer.detach().clone()


def _alike(buffer: Tensor | None, before: Tensor | None) -> bool:
    if buffer is None or before is None or is_lazy(buffer):
        return buffer is before
    if buffer.layout != before.layout or buffer.dtype != before.dtype:
        return False
    now, then = strided_parts(buffer), strided_parts(before)
    return all(map(torch.equal, now, then))
