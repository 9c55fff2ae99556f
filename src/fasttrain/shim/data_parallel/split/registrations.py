"""Hooks, modules and parameters that are registered on modules, and those of the script's own.

A hook of the script's has to see whole batches.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from torch.nn import Module
from torch.nn.modules import module as torchs

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.seams import Hooking

ALL_MODULES = "all modules"

_OF_MODULES = (
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook", "register_backward_hook",
)  # fmt: skip
_HOOK_SLOTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL = tuple(f"_global{slot}" for slot in _HOOK_SLOTS)


class Marks:
    """Counts something that happens to modules, and knows when it last happened to each.

    Attributes:
        count: How often it has happened to any module.
    """

    def __init__(self) -> None:
        self.count = 0
        # By id: a class of the script's may have a hash that fails in its constructor.
        self._last: dict[int, tuple[weakref.ref[Module], int]] = {}

    def note(self, module: Module) -> None:
        """Note that it happens to a module."""
        self.count += 1
        known = self._last.get(id(module))
        ref = known[0] if known is not None else weakref.ref(module, self._forgetting(id(module)))
        self._last[id(module)] = ref, self.count

    def _forgetting(self, key: int) -> Callable[[object], None]:
        last = self._last

        def forget(_: object) -> None:
            last.pop(key, None)

        return forget

    def any_since(self, count: int, modules: Iterable[Module]) -> bool:
        """True if it has happened to one of the modules after it had happened that often."""
        if count == self.count:
            return False
        last = self._last
        return any(id(part) in last and last[id(part)][1] > count for part in modules)


class HookCount:
    """Notes hooks as they are registered, so that a call with new ones is verified again.

    Attributes:
        registered: Marks of modules that a hook was registered on, or a module or parameter.
        moved: Number of modules whose own parameters went to another device or got another dtype.
    """

    def __init__(self) -> None:
        self.registered, self.moved = Marks(), 0

    def install(self, undo: ExitStack) -> None:
        """Wrap the methods that register hooks; use torch's own hooks for new parts of modules."""
        for name in _OF_MODULES:
            patching.wrap(Module, name, self._counted, undo, Hooking.SPLIT)
        patching.wrap(Module, "_apply", self._seen_moving, undo)
        for register in (
            torchs.register_module_module_registration_hook,
            torchs.register_module_parameter_registration_hook,
        ):
            undo.callback(register(self._count).remove)

    def _count(self, owner: Module, name: str, part: Any) -> None:
        known = owner._parameters.get(name, owner._modules.get(name))
        # FSDP assigns whole parameters to a module with a `__setattr__` of its own, such as a
        # recurrent layer, in each call, and the shards after it.
        sharded = any(hasattr(each, "placements") for each in (known, part))
        if not sharded and part is not known:  # a known part was only assigned again
            self.registered.note(owner)

    def _counted(self, original: Any) -> Any:
        @functools.wraps(original)
        def register(module: Module, *args: Any, **kwargs: Any) -> Any:
            self.registered.note(module)
            return original(module, *args, **kwargs)

        return register

    def _seen_moving(self, original: Any) -> Any:
        @functools.wraps(original)
        def apply(module: Module, *args: Any, **kwargs: Any) -> Any:
            before = _kinds(module)
            try:
                return original(module, *args, **kwargs)
            finally:
                self.moved += _kinds(module) != before

        return apply


def _kinds(module: Module) -> list[Any]:
    return [(p.dtype, p.device) for p in module._parameters.values() if p is not None]


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
