"""Gradients by a tensor that a model gives beside what it has made of it, such as a loss.

In a split call the tensor that the script gets is put together beside the graph: what the model has
made of the rank's rows doesn't pass through it, and a gradient or a hook would lack that part. So a
script that asks for one in a verified call, which is whole, has its model called whole from
there on; one that first asks later is ended with words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.seams import Hooking

_ASKED = "fasttrain: given beside what was made of it"  # in the metadata of a tensor's node


def mark(tensors: Iterable[Tensor], asked: Callable[[], None]) -> None:
    """Call a function when the script asks for a gradient by one of some tensors."""
    for tensor in tensors:
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata[_ASKED] = asked


def see(tensors: Iterable[Any]) -> None:
    """Note that the script asks for gradients by some tensors."""
    for tensor in tensors:
        node: Any = tensor.grad_fn if isinstance(tensor, Tensor) else None
        if node is not None and (asked := node.metadata.get(_ASKED)) is not None:
            asked()


def install(undo: ExitStack) -> None:
    """See hooks on tensors, and gradients that are to be retained."""
    for name in ("register_hook", "retain_grad"):
        patching.wrap(Tensor, name, _seen, undo, Hooking.SPLIT)


def _seen(original: Any) -> Any:
    @functools.wraps(original)
    def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.grad_fn is not None:
            see((tensor,))
        return original(tensor, *args, **kwargs)

    return method
