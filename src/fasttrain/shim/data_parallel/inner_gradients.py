"""Detects gradients w.r.t. a tensor that a model returns along with a result of it, such as a loss.

In a split call the script gets a gathered copy of such a tensor. The model computed the loss from
the rank's rows and not from the copy, so that a gradient w.r.t. the copy, or a hook on it, would
lack the loss's part. A script that asks for such a gradient in a verified call, which runs on the
whole batch, has its model called with the whole batch from then on. One that first asks later is
ended with an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.seams import Hooking

_ASKED = "fasttrain: returned with its result"  # key in the metadata of a tensor's autograd node


def mark(tensors: Iterable[Tensor], asked: Callable[[], None]) -> None:
    """Have a function called when the script asks for a gradient w.r.t. one of these tensors."""
    for tensor in tensors:
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata[_ASKED] = asked


def see(tensors: Iterable[Any]) -> None:
    """Call the functions of marked tensors: the script asks for gradients w.r.t. these."""
    for tensor in tensors:
        node: Any = tensor.grad_fn if isinstance(tensor, Tensor) else None
        if node is not None and (asked := node.metadata.get(_ASKED)) is not None:
            asked()


def install(undo: ExitStack) -> None:
    """Watch for hooks on tensors and for ``retain_grad()``."""
    for name in ("register_hook", "retain_grad"):
        patching.wrap(Tensor, name, _seen, undo, Hooking.SPLIT)


def _seen(original: Any) -> Any:
    @functools.wraps(original)
    def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.grad_fn is not None:
            see((tensor,))
        return original(tensor, *args, **kwargs)

    return method
