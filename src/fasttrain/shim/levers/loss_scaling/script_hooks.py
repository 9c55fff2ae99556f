"""Passes the script's gradient hooks the gradients that they would get without loss scaling.

Hooks that clip, mask or record gradients run inside the backward pass, where gradients are scaled.
So these are divided by the scale before a hook and multiplied after it, which is exact: the scale
is a power of two.

Hooks on autograd nodes (``grad_fn.register_hook``) get scaled gradients, because torch itself
registers such hooks.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from fasttrain.shim.hooks.casting import map_tensors
from fasttrain.shim.hooks.hook_wrappers import Hook, wrap_module_hooks, wrap_tensor_hooks
from fasttrain.shim.hooks.seams import Hooking


class GradientHooks:
    """Wraps hooks on tensors when they are registered, and hooks on modules at each call.

    Attributes:
        scale: The scale of the backward pass that is running; None outside of a scaled one. One for
            all threads, because the autograd engine calls hooks from threads of its own.
    """

    def __init__(self) -> None:
        self.scale: Tensor | None = None

    def install(self, undo: ExitStack) -> None:
        """Watch for hooks."""
        wrap_tensor_hooks("register_hook", self._on_gradient, undo, Hooking.LOSS_SCALING)
        if hasattr(Tensor, "register_post_accumulate_grad_hook"):  # torch 2.1
            name = "register_post_accumulate_grad_hook"
            wrap_tensor_hooks(name, self._on_accumulated, undo, Hooking.LOSS_SCALING)
        wrap_module_hooks(self._on_module, undo, Hooking.LOSS_SCALING)

    def _on_gradient(self, hook: Hook) -> Hook:
        @functools.wraps(hook)
        def wrapped(gradient: Tensor) -> Any:
            scale = self.scale
            if scale is None:
                return hook(gradient)
            shown = _divided(gradient, scale)
            result = hook(shown)
            if result is None and not shown._version:
                return None  # unchanged; the divided gradient may have become 0 in fp16
            # Some hooks change their argument in place, against torch's advice.
            return _multiplied(shown if result is None else result, scale)

        return wrapped

    def _on_module(self, hook: Hook) -> Hook:
        @functools.wraps(hook)
        def wrapped(module: Any, *gradients: Any) -> Any:
            scale = self.scale
            if scale is None:
                return hook(module, *gradients)
            shown = map_tensors(gradients, functools.partial(_divided, scale=scale))
            result = hook(module, *shown)
            return map_tensors(result, functools.partial(_multiplied, scale=scale))

        return wrapped

    def _on_accumulated(self, hook: Hook) -> Hook:
        @functools.wraps(hook)
        def wrapped(parameter: Tensor) -> None:
            scale = self.scale
            if scale is None or parameter.grad is None:
                hook(parameter)
                return
            parameter.grad = _divided(parameter.grad, scale)
            hook(parameter)
            if parameter.grad is not None:
                parameter.grad = _multiplied(parameter.grad, scale)

        return wrapped


def _divided(gradient: Tensor, scale: Tensor) -> Tensor:
    return _times(gradient, scale.double().reciprocal().float())


def _multiplied(gradient: Tensor, scale: Tensor) -> Tensor:
    return _times(gradient, scale)


def _times(gradient: Tensor, factor: Tensor) -> Tensor:
    # In fp32: a scale of 2**16 is no fp16 number.
    wide = gradient if gradient.dtype is torch.float64 else gradient.float()
    return (wide * factor.to(gradient.device)).to(gradient.dtype)
