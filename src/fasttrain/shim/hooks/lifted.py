"""Lets the script ask for gradients by low-precision tensors that it was given in fp32.

What a root returns, and what its modules keep, is cast for the script. The cast is a branch: what
the model computes from the same tensor doesn't pass through it. So a gradient by such a tensor, a
hook on it, and the gradient that it retains are those of the tensor that was cast, where all
branches meet. Nothing else would show it: a gradient would lack a part, a hook would never run.

Source: ``torch/autograd/__init__.py`` of torch 2.13: all passes go through
``_engine_run_backward``, whose fourth argument behind the outputs are the inputs. A torch without
it gives the branch's part alone.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.dynamo_skip import pass_over
from fasttrain.shim.hooks.hook_wrappers import Hook
from fasttrain.shim.hooks.seams import Hooking

# In the metadata of the cast's node, which lives and dies with the graph; no tensor is kept alive.
_LIFTED = "fasttrain: cast for the script"
INPUTS = 3  # their place among the arguments behind the outputs


def lift(tensor: Tensor) -> Tensor:
    """Cast to fp32 a tensor that the script gets at."""
    result = tensor.float()
    node: Any = result.grad_fn
    if node is not None and result is not tensor:
        node.metadata[_LIFTED] = True
        if tensor.retains_grad:  # the model has asked for it
            result.retain_grad()
    return result


def made_by(tensor: Tensor) -> Any:
    """Return the node of the graph at which a tensor's gradients meet."""
    node: Any = tensor.grad_fn
    return node.next_functions[0][0] if is_lifted(tensor) else node


def is_lifted(tensor: Any) -> bool:
    """Return whether a tensor is one that `lift` has made, and not yet changed in place."""
    node: Any = tensor.grad_fn if isinstance(tensor, Tensor) else None
    return node is not None and _LIFTED in node.metadata


def install(undo: ExitStack) -> None:
    """Replace what takes gradients by tensors."""
    if hasattr(torch.autograd, "_engine_run_backward"):
        patching.wrap(torch.autograd, "_engine_run_backward", _watched_passes, undo)
    for name, act in (("register_hook", _hook), ("retain_grad", _retain)):
        patching.wrap(Tensor, name, functools.partial(_instead, act), undo, Hooking.LIFTED)


def _instead(act: Callable[..., Any], original: Any) -> Any:
    @functools.wraps(original)
    def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not is_lifted(tensor):
            return original(tensor, *args, **kwargs)
        return act(original, tensor, *args, **kwargs)

    return method


def _edge(tensor: Tensor) -> Any:
    """Return where all gradients by a lifted tensor meet: a node, and which of its outputs."""
    cast: Any = tensor.grad_fn
    return torch.autograd.graph.GradientEdge(*cast.next_functions[0])


class _Branch:
    """What the running pass brings to a lifted tensor by way of the cast; keeps no graph alive."""

    def __init__(self, tensor: Tensor) -> None:
        cast: Any = tensor.grad_fn
        self._gradients: list[Tensor] = []
        self._handle = cast.register_prehook(self._note)

    def _note(self, gradients: tuple[Tensor, ...]) -> None:
        self._gradients[:] = gradients[:1]

    def rest(self, low: Tensor) -> Tensor:
        """Return in fp32 what a gradient at the edge has of other ways than by the cast."""
        gradient = low.float()
        for branch in self._gradients:
            rounded = branch.to(low.dtype).float()
            # What overflows in the cast, and not before it, hides what else there is.
            gradient = torch.where(rounded.isinf(), 0.0, gradient - rounded)
        return gradient

    def whole(self, low: Tensor) -> Tensor:
        """Return all of it; what has come by the cast is not rounded."""
        gradient = self.rest(low)
        for branch in self._gradients:
            gradient = gradient + branch
        self.forget()
        return gradient

    def forget(self) -> None:
        """Let go of the running pass."""
        self._gradients.clear()

    def leave(self) -> None:
        """Look at no further pass."""
        self._handle.remove()


def _hook(_: Any, tensor: Tensor, hook: Hook) -> Any:
    branch = _Branch(tensor)
    node, at, *_ = _edge(tensor)

    def on_gradients(gradients: tuple[Tensor | None, ...]) -> Any:
        gradient = gradients[at]
        if gradient is None:
            return None
        shown = branch.whole(gradient)
        result = hook(shown)
        if result is None and not shown._version:
            return None
        # Some change what they are shown in place, against torch's advice.
        changed = (shown if result is None else result).to(gradient.dtype)
        return (*gradients[:at], changed, *gradients[at + 1 :])

    return node.register_prehook(on_gradients)


def _retain(original: Any, tensor: Tensor) -> None:
    if tensor.retains_grad:
        return
    original(tensor)  # it keeps what comes by the cast
    branch, ref = _Branch(tensor), weakref.ref(tensor)
    node, at, *_ = _edge(tensor)

    def on_gradients(gradients: tuple[Tensor | None, ...]) -> None:
        gradient, kept = gradients[at], ref()
        if gradient is not None and kept is not None:
            _add(kept, branch.rest(gradient))
        branch.forget()

    node.register_prehook(on_gradients)


def _add(tensor: Tensor, gradient: Tensor) -> None:
    """Add to a gradient as torch does on a tensor that is no leaf: never in place."""
    tensor.grad = gradient.clone() if tensor.grad is None else tensor.grad + gradient


def _watched_passes(original: Any) -> Any:
    @functools.wraps(original)
    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = args[INPUTS] if len(args) > INPUTS else ()
        if not any(map(is_lifted, inputs)):
            return original(outputs, *args, **kwargs)
        branches = [_Branch(tensor) if is_lifted(tensor) else None for tensor in inputs]
        take = _leave_gradients if kwargs.get("accumulate_grad") else _give_gradients
        try:
            return take(original, branches, outputs, *args, **kwargs)
        finally:
            for branch in filter(None, branches):
                branch.leave()

    pass_over(run)
    return run


def _give_gradients(
    original: Any, branches: list[_Branch | None], outputs: Any, *args: Any, **kwargs: Any
) -> Any:
    before, inputs, behind = args[:INPUTS], args[INPUTS], args[INPUTS + 1 :]
    pairs = list(zip(inputs, branches, strict=True))
    asked = tuple(_edge(tensor) if branch else tensor for tensor, branch in pairs)
    found = original(outputs, *before, asked, *behind, **kwargs)
    return tuple(
        branch.whole(gradient) if branch and gradient is not None else gradient
        for gradient, branch in zip(found, branches, strict=True)
    )


def _leave_gradients(
    original: Any, branches: list[_Branch | None], outputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Leave gradients on the inputs; as torch can leave none at an edge, it gives those first."""
    before, inputs, behind = args[:INPUTS], args[INPUTS], args[INPUTS + 1 :]
    others = tuple(t for t, branch in zip(inputs, branches, strict=True) if not branch)
    seeds, retained, create = before
    earlier = [tensor.grad if tensor.retains_grad else None for tensor in inputs]
    may_be_unused = True  # as it is where gradients are left
    found = _give_gradients(
        original, branches, outputs, seeds, bool(others) or retained, create, inputs, may_be_unused
    )
    if others:
        original(outputs, *before, others, *behind, **kwargs)
    for tensor, branch, grad, gradient in zip(inputs, branches, earlier, found, strict=True):
        if branch and gradient is not None:
            tensor.retain_grad()  # as torch does
            tensor.grad = grad  # less what these passes have left of it
            _add(tensor, gradient)
    return ()
