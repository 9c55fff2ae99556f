"""Wraps the script's gradient hooks, for levers that pass them changed gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.utils.hooks import BackwardHook

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.seams import Hooking

Hook = Callable[..., Any]


def wrap_tensor_hooks(
    name: str, wrap: Callable[[Hook], Hook], undo: ExitStack, place: Hooking
) -> None:
    """Wrap hooks on tensors when they are registered by ``Tensor``'s method of that name."""

    def wrapped(original: Any) -> Any:
        @functools.wraps(original)
        def register(tensor: Tensor, hook: Hook) -> Any:
            return original(tensor, wrap(hook))

        return register

    patching.wrap(Tensor, name, wrapped, undo, place)


def wrap_module_hooks(wrap: Callable[[Hook], Hook], undo: ExitStack, place: Hooking) -> None:
    """Wrap each call's own list of full backward hooks: the module's, which is pickled, stays."""

    def wrapped(original: Any) -> Any:
        @functools.wraps(original)
        def __init__(holder: Any, module: Any, hooks: Any, pre_hooks: Any) -> None:  # noqa: N807
            hooks, pre_hooks = ([wrap(hook) for hook in each] for each in (hooks, pre_hooks))
            original(holder, module, hooks, pre_hooks)

        return __init__

    patching.wrap(BackwardHook, "__init__", wrapped, undo, place)
