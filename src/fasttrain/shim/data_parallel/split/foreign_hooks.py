"""The script's own hooks on modules: they have to see whole batches."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from torch.nn import Module
from torch.nn.modules import module as torchs
from torch.nn.parallel import DistributedDataParallel

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.seams import Hooking

ALL_MODULES = "all modules"

_OF_MODULES = (
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook", "register_backward_hook",
)  # fmt: skip
_SLOTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL = tuple(f"_global{slot}" for slot in _SLOTS)


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
    for slot in _SLOTS:
        yield from getattr(part, slot).values()


def _is_foreign(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return not home.startswith("torch.")
