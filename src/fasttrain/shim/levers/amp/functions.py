"""Runs the script's own `torch.autograd.Function` forward and backward in one precision.

Autocast doesn't cover backward passes: a matrix product in the backward of a custom Function would
get fp32 tensors together with low-precision ones that its forward has saved. Such a Function runs
in fp32, as with `torch.amp.custom_fwd`. One that gets modules or functions as arguments may be a
checkpoint, which repeats its forward in backward: both stay in low precision.

Torch's own Functions and those of installed packages, which may need low precision, are unchanged.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.amp import autocast

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.casting import to_float32
from fasttrain.shim.hooks.dynamo_skip import pass_over

_RAN_ON = "_fasttrain_autocast_device"  # set on a Function's context


class Region(threading.local):
    """The device type of the root's call that a thread is in; empty outside of any."""

    device = ""


class CustomFunctions:
    """Wraps ``Function.apply``, and the call of a Function's backward.

    Args:
        dtype: The low precision.
        lowered: Returns a context of the autocast of roots, for a device type.
    """

    def __init__(
        self, dtype: torch.dtype, lowered: Callable[[str], AbstractContextManager[Any]]
    ) -> None:
        self.region = Region()
        # Device type of the last region: a backward pass may repeat a forward in another thread.
        self.lowered_on = ""
        self._dtype = dtype
        self._lowered = lowered
        self._scripts: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()

    def install(self, undo: ExitStack) -> None:
        """Put the replacements in place."""
        for helper in (CustomFunctions._is_scripts, _holds_code, _marked):
            pass_over(helper)
        function: Any = torch.autograd.Function
        patching.wrap(function, "apply", self._applied, undo)
        backward: Any = torch.autograd.function.BackwardCFunction
        for name in ("apply", "apply_boxed"):
            if hasattr(backward, name):
                patching.wrap(backward, name, self._repeated, undo)

    def _applied(self, method: Any) -> Any:
        original = method.__func__  # of a classmethod

        @functools.wraps(original)
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            device = self.region.device
            if not device and torch._C._current_graph_task_id() != -1:
                device = self.lowered_on  # a checkpoint repeats its forward
            if not device or not torch.is_autocast_enabled(device) or not self._is_scripts(cls):
                return original(cls, *args, **kwargs)
            if any(map(_holds_code, args)):
                return _marked(original(cls, *args, **kwargs), cls, device)
            with autocast(device, enabled=False):
                lifted = to_float32(args, self._dtype)
                output = original(cls, *lifted, **kwargs)
            for given, used in zip(args, lifted, strict=True):
                if used is not given and isinstance(used, Tensor) and used._version:
                    given.copy_(used)  # the Function changed it in place
            return output

        pass_over(apply)
        return classmethod(apply)

    def _repeated(self, original: Any) -> Any:
        @functools.wraps(original)
        def apply(context: Any, *args: Any) -> Any:
            device = getattr(context, _RAN_ON, None)
            if device is None:
                return original(context, *args)
            with self._lowered(device):
                return original(context, *args)

        pass_over(apply)
        return apply

    def _is_scripts(self, cls: type) -> bool:
        """True if a Function is the user's own: neither torch's nor of an installed package."""
        known = self._scripts.get(cls)
        if known is None:
            module = sys.modules.get(cls.__module__)
            path = getattr(module, "__file__", None) or ""
            own = cls.__module__.startswith(("torch.", "fasttrain."))
            known = not own and "site-packages" not in path
            self._scripts[cls] = known
        return known


def _holds_code(argument: Any) -> bool:
    if isinstance(argument, list | tuple):
        return any(map(_holds_code, argument))
    return callable(argument) and not inspect.isclass(argument)


def _marked(output: Any, cls: Any, device: str) -> Any:
    for tensor in output if isinstance(output, tuple) else (output,):
        node = tensor.grad_fn if isinstance(tensor, Tensor) else None
        if isinstance(node, cls._backward_cls):
            setattr(node, _RAN_ON, device)
    return output
