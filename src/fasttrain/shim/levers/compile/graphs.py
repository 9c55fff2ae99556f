"""Decides which calls of a compiled root are replayed as CUDA graphs.

A CUDA graph writes its outputs and gradients to the same memory at every replay. Whatever is
still in use then is overwritten: gradients that accumulate, a second call before the backward
pass, outputs that the script keeps (pytorch#169545, #148439, #158551, with
DistributedDataParallel #140395). So CUDA graphs are used only after the loop has done none of
this for some steps, and given up at the first sign of it. Outputs are copied, gradients are
not: a script that keeps some, or has hooks that could, gets no CUDA graphs. In all other calls
the root runs compiled without.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fasttrain.shim.hooks.containers import map_tensors
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.hooks.roots import parameters_of

WITHOUT_GRAPHS = "without CUDA graphs"
OTHER_SHAPES = "calls with other input shapes are made without CUDA graphs"
CALLED_AGAIN = "is called more than once per optimizer step"
EARLIER_GRADIENTS = "is called while it has gradients of an earlier backward pass"
KEPT_GRADIENTS = "gradients are kept beyond their step"
HOOKED = "its parameters have gradient hooks"
INPUT_GRADIENT = "an input takes a gradient"

Call = Callable[..., Any]
Shapes = tuple[Any, ...]
# Steps for which a loop is watched: enough to see more than its first step, which often differs.
PROBATION_STEPS = 3


class GraphGuard:
    """Watches the one trained root of a loop.

    Args:
        graphed: The root's function, compiled with CUDA graphs.
        recorder: The compile lever's, for what was decided and why.
    """

    def __init__(self, graphed: Call, recorder: OutcomeRecorder) -> None:
        self._graphed = graphed
        self._recorder = recorder
        self._steps = 0  # the optimizers'
        self._called_at = -1
        self._safe_steps = 0
        self._shapes: Shapes | None = None
        self._gradients: list[weakref.ref[Tensor]] = []  # of the last step
        self._refused = False

    def install(self, undo: ExitStack) -> None:
        """Count the optimizers' steps."""
        undo.callback(register_optimizer_step_post_hook(self._after_step).remove)

    def refuse(self, reason: str) -> None:
        """Use no CUDA graphs from now on."""
        if not self._refused:
            self._refused = True
            self._recorder.note(f"{WITHOUT_GRAPHS}: {reason}")

    def admits(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if this call may be a replay."""
        if self._refused or not (torch.is_grad_enabled() and module.training):
            return False  # a validation makes no steps, between which calls could be watched
        if reason := self._danger(module) or _leak(module, args, kwargs):
            self.refuse(reason)
            return False
        self._called_at = self._steps
        shapes = _shapes(args, kwargs)
        if self._shapes is None:
            self._shapes = shapes
        if shapes != self._shapes:
            self._recorder.note(OTHER_SHAPES)
            return False
        self._safe_steps += 1
        return self._safe_steps > PROBATION_STEPS

    def replay(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call by a CUDA graph, and copy its output out of the graph's memory."""
        self._recorder.counts["CUDA graph calls"] += 1
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return map_tensors(self._graphed(module, *args, **kwargs), Tensor.clone)

    def _danger(self, module: Module) -> str:
        name = type(module).__name__
        if self._called_at == self._steps:
            return f"{name} {CALLED_AGAIN}"
        if any(p.grad is not None for p in parameters_of(module)):
            return f"{name} {EARLIER_GRADIENTS}"
        if any(gradient() is not None for gradient in self._gradients):
            return KEPT_GRADIENTS
        return ""

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or self._refused:
            return
        self._steps += 1
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._gradients = [weakref.ref(p.grad) for p in parameters if p.grad is not None]


def _leak(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return how the script could keep gradients unseen, in a graph's memory; empty if it can't."""
    if any(p._backward_hooks or _accumulated_hooks(p) for p in parameters_of(module)):
        return HOOKED
    if any(isinstance(v, Tensor) and v.requires_grad for v in (*args, *kwargs.values())):
        return INPUT_GRADIENT
    return ""


def _accumulated_hooks(parameter: Any) -> Any:
    return getattr(parameter, "_post_accumulate_grad_hooks", None)  # torch 2.1


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    """Return the shapes and dtypes of tensors, and the numbers, for which a graph is made."""
    found: list[Any] = []

    def see(value: Any) -> Any:
        found.append((value.shape, value.dtype))
        return value

    map_tensors((args, kwargs), see)
    numbers = [v for v in (*args, *kwargs.values()) if isinstance(v, bool | int | float | str)]
    return (*found, *numbers)
