"""Wraps the script's gradient hooks, for levers that pass them changed gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.utils.hooks import BackwardHook

Hook = Callable[..., Any]


def wrap_tensor_hooks(name: str, wrap: Callable[[Hook], Hook], undo: ExitStack) -> None:
    """Wrap hooks on tensors when they are registered by ``Tensor``'s method of that name."""
    original = getattr(Tensor, name)

    @functools.wraps(original)
    def register(tensor: Tensor, hook: Hook) -> Any:
        return original(tensor, wrap(hook))

    put_method(name, register, undo)


def wrap_module_hooks(wrap: Callable[[Hook], Hook], undo: ExitStack) -> None:
    """Wrap each call's own list of full backward hooks: the module's, which is pickled, stays."""
    original: Any = BackwardHook.__init__

    @functools.wraps(original)
    def __init__(holder: Any, module: Any, hooks: Any, pre_hooks: Any) -> None:  # noqa: N807
        original(holder, module, [wrap(hook) for hook in hooks], [wrap(hook) for hook in pre_hooks])

    undo.callback(setattr, BackwardHook, "__init__", original)
    setattr(BackwardHook, "__init__", __init__)  # noqa: B010


def put_method(name: str, method: Any, undo: ExitStack) -> None:
    """Replace a method that ``Tensor`` has or inherits."""
    if name in vars(Tensor):
        undo.callback(setattr, Tensor, name, vars(Tensor)[name])
    else:
        undo.callback(delattr, Tensor, name)
    setattr(Tensor, name, method)
