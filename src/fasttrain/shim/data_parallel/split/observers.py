"""What sees each operation of a call: dispatch and function modes, and hooks on saved tensors."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fasttrain.shim.hooks import patching


def is_observed() -> bool:
    """True if something that is neither torch's nor fasttrain's sees what is computed."""
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    return bool(modes and (_dispatch_mode() or _function_mode())) or saving_hook()


def _dispatch_mode() -> bool:
    """True if a dispatch mode other than fasttrain's is active."""
    modes = _get_current_dispatch_mode_stack()
    return any(not type(mode).__module__.startswith("fasttrain.") for mode in modes)


def _function_mode() -> bool:
    """True if a TorchFunctionMode is active that is not torch's own, such as a default device."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(not type(mode).__module__.startswith(("torch.", "fasttrain.")) for mode in modes)


# The script's contexts of hooks on saved tensors that it is in, where torch can't be asked.
_ENTERED: list[Any] = []


def watch_saving_hooks(undo: ExitStack) -> None:
    """Have `saving_hook` know of hooks on saved tensors with torch 2.7, which can't be asked."""
    if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
        hooks = torch.autograd.graph.saved_tensors_hooks
        patching.wrap(hooks, "__enter__", _entering, undo)
        patching.wrap(hooks, "__exit__", _leaving, undo)


def _entering(original: Any) -> Any:
    @functools.wraps(original)
    def __enter__(context: Any) -> Any:  # noqa: N807
        result = original(context)
        if _is_scripts_hook(context.pack_hook):
            _ENTERED.append(context)
        return result

    return __enter__


def _leaving(original: Any) -> Any:
    @functools.wraps(original)
    def __exit__(context: Any, *args: Any) -> Any:  # noqa: N807
        if context in _ENTERED:
            _ENTERED.remove(context)
        return original(context, *args)

    return __exit__


def saving_hook() -> bool:
    """True if hooks on saved tensors are active that are not torch's own."""
    ask: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if ask is None:
        return bool(_ENTERED)
    hooks = ask(True)  # noqa: FBT003
    return hooks is not None and _is_scripts_hook(hooks[0])


def _is_scripts_hook(hook: Any) -> bool:
    return not str(hook.__module__).startswith("torch")
