"""The modules of a root: hooks that the script has put on them, and what a call changes in them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from operator import is_not
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as torchs
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from fasttrain.shim.data_parallel.tensor_sums import strided_parts, sums_of
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.roots import parameters_of
from fasttrain.shim.hooks.seams import Hooking

# The script's own hooks on modules: they have to see whole batches.


ALL_MODULES = "all modules"

_OF_MODULES = (
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook", "register_backward_hook",
)  # fmt: skip
_HOOK_SLOTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL = tuple(f"_global{slot}" for slot in _HOOK_SLOTS)


class HookCount:
    """Counts hooks as they are registered, so that a call with new ones is verified again.

    Attributes:
        registered: Number of hooks registered on modules, and of modules and parameters added.
    """

    def __init__(self) -> None:
        self.registered = 0

    def install(self, undo: ExitStack) -> None:
        """Wrap the methods that register hooks; use torch's own hooks for new parts of modules."""
        for name in _OF_MODULES:
            patching.wrap(Module, name, self._counted, undo, Hooking.SPLIT)
        for register in (
            torchs.register_module_module_registration_hook,
            torchs.register_module_parameter_registration_hook,
        ):
            undo.callback(register(self._count).remove)

    def _count(self, owner: Module, name: str, part: Any) -> None:
        known = owner._parameters.get(name, owner._modules.get(name))
        ours = isinstance(owner, DistributedDataParallel)
        self.registered += not (ours or part is known)  # a known part was only assigned again

    def _counted(self, original: Any) -> Any:
        @functools.wraps(original)
        def register(*args: Any, **kwargs: Any) -> Any:
            self.registered += 1
            return original(*args, **kwargs)

        return register


def foreign_hook(module: Module) -> str:
    """Return the class of the first module with a hook of the script's; empty if there is none."""
    for name in _GLOBAL:
        if any(map(_is_foreign, getattr(torchs, name).values())):
            return ALL_MODULES
    parts = (part for part in Module.modules(module) if any(map(_is_foreign, _hooks(part))))
    return next((type(part).__name__ for part in parts), "")


def _hooks(part: Module) -> Iterator[Any]:
    for slot in _HOOK_SLOTS:
        yield from getattr(part, slot).values()


def _is_foreign(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return not home.startswith("torch.")


# What a call changes in a root's modules: attributes, buffers and values of parameters.


# A module's own containers; their contents are compared separately.
_SLOTS = frozenset({"_parameters", "_buffers", "_modules"})
Place = tuple[int, str]  # the number of a module in the order of `Module.modules`, and a name


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

    def left(self) -> dict[Place, Any]:
        """Return the attributes and buffers that were replaced or, for buffers, changed."""
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

    def put(self) -> None:
        """Restore the attributes and the buffers themselves."""
        for part, attributes, slot in zip(self.parts, self._attributes, self._slots, strict=True):
            _set(vars(part), attributes)
            _set(part._buffers, slot)


def parameter_sums(module: Module) -> list[float]:
    """Return checksums of all parameters.

    A copy to compare with would double the parameters' memory.
    """
    return sums_of([p for p in parameters_of(module) if not is_lazy(p)])


def _set(slot: dict[str, Any], values: dict[str, Any]) -> None:
    for name in slot.keys() - values.keys():
        del slot[name]
    slot.update(values)


def _clone(buffer: Tensor | None) -> Tensor | None:
    return buffer if buffer is None or is_lazy(buffer) else buffer.detach().clone()


def _alike(buffer: Tensor | None, before: Tensor | None) -> bool:
    if buffer is None or before is None or is_lazy(buffer):
        return buffer is before
    if buffer.layout != before.layout or buffer.dtype != before.dtype:
        return False
    now, then = strided_parts(buffer), strided_parts(before)
    return all(map(torch.equal, now, then))
