"""Lets the script's hooks work inside a root that runs in low precision.

A forward hook gets its module's output in fp32, and so do the modules after it. What a script keeps
there, for a loss, a projection or a plot, is used together with its own fp32 tensors outside of the
root. A gradient hook that fails on low-precision gradients is called again with fp32 ones.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.casting import to_float32
from fasttrain.shim.hooks.hook_wrappers import Hook, wrap_module_hooks, wrap_tensor_hooks
from fasttrain.shim.hooks.seams import Hooking
from fasttrain.shim.levers.amp.functions import Region
from fasttrain.shim.levers.amp.repeat import may_explain, names_types, one_line

PLACES = {"register_forward_pre_hook": "inputs", "register_forward_hook": "output"}


class Hooks:
    """Wraps hooks on modules and on gradients when they are registered.

    Args:
        dtype: The low precision.
        region: Whether a thread is inside a root's call, and on which device type.
        note: Adds one detail to the receipt.
    """

    def __init__(self, dtype: torch.dtype, region: Region, note: Callable[[str], None]) -> None:
        self._dtype = dtype
        self._region = region
        self._note = note

    def install(self, undo: ExitStack) -> None:
        """Put the replacements in place."""
        wrap_tensor_hooks("register_hook", self._on_gradients, undo, Hooking.AMP)
        wrap_module_hooks(self._on_gradients, undo, Hooking.AMP)
        for name, place in PLACES.items():
            make = functools.partial(self._watched, place)
            patching.wrap(Module, name, make, undo, Hooking.AMP)

    def _watched(self, place: str, original: Any) -> Any:
        @functools.wraps(original)
        def register(module: Module, hook: Hook, *args: Any, **kwargs: Any) -> Any:
            if not getattr(hook, "__module__", "").startswith("torch."):
                hook = Lifting(hook, place, self._dtype, self._region)
            return original(module, hook, *args, **kwargs)

        return register

    def _on_gradients(self, hook: Hook) -> Hook:
        @functools.wraps(hook)
        def wrapped(*args: Any) -> Any:
            try:
                return hook(*args)
            except Exception as error:
                lifted = to_float32(args, self._dtype)
                fits = may_explain(error, self._dtype) and names_types(error, self._dtype)
                if lifted is args or not fits:
                    raise
                failure = one_line(error)
            result = hook(*lifted)
            self._note(f"a gradient hook failed in low precision and ran again in fp32: {failure}")
            return self._lowered(result, args, lifted)

        return wrapped

    @staticmethod
    def _lowered(result: Any, given: tuple[Any, ...], lifted: tuple[Any, ...]) -> Any:
        """Return a hook's result in the precision of the gradients that it replaces."""
        gradient = given[0]
        if isinstance(gradient, Tensor):
            if result is None and not lifted[0]._version:
                return None
            # Some hooks change their argument in place, against torch's advice.
            return (lifted[0] if result is None else result).to(gradient.dtype)
        if not isinstance(result, tuple):
            return result
        return tuple(
            new.to(old.dtype) if isinstance(new, Tensor) and isinstance(old, Tensor) else new
            for new, old in zip(result, given[1], strict=False)
        )


class Lifting:
    """Wraps a forward hook, which gets fp32 tensors; a pickle of it is the hook itself."""

    def __init__(self, hook: Hook, place: str, dtype: torch.dtype, region: Region) -> None:
        self._hook = hook
        self._place = place
        self._dtype = dtype
        self._region = region

    def __call__(self, module: Module, *given: Any) -> Any:
        """Call the hook with torch's arguments: inputs, keyword arguments, output."""
        if not self._region.device:
            return self._hook(module, *given)
        at = 0 if self._place == "inputs" else len(given) - 1
        lifted = to_float32(given[at], self._dtype)
        shown = (*given[:at], lifted, *given[at + 1 :])
        result = self._hook(module, *shown)
        if result is not None or lifted is given[at]:
            return result
        # A pre-hook that takes keyword arguments returns both.
        return lifted if len(shown) == 1 or at else shown

    def __deepcopy__(self, memo: dict[int, Any]) -> Lifting:
        return Lifting(copy.deepcopy(self._hook, memo), self._place, self._dtype, self._region)

    def __reduce__(self) -> Any:
        return copy.copy, (self._hook,)
