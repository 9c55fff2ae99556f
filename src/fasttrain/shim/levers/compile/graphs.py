"""Decides which calls of a compiled root are replayed as CUDA graphs.

A CUDA graph writes its outputs and gradients to the same memory at every replay. Whatever is
still in use then is overwritten: a second call before the backward pass, tensors that the forward
leaves on its module, outputs and gradients that the script keeps (pytorch#169545, #148439, #158551,
with DistributedDataParallel #140395). So CUDA graphs are used only after the loop has done none of
this for some steps, and given up at the first sign of it. Outputs are copied, and so are gradients
that parameters still have when the next replay comes. In all other calls the root runs compiled
without.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.containers import map_tensors, tensors_in
from fasttrain.shim.hooks.dynamo import pass_over
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.hooks.roots import parameters_of
from fasttrain.shim.hooks.seams import Differentiating, Hooking
from fasttrain.shim.levers.compile.graph_memory import Gradients, Look

WITHOUT_GRAPHS = "without CUDA graphs"
OTHER_SHAPES = "calls with other input shapes are made without CUDA graphs"
CALLED_AGAIN = "is called more than once per optimizer step"
KEPT_GRADIENTS = "gradients are kept beyond their step"
HOOKED = "its parameters have gradient hooks"
BACKWARD_HOOKS = "its modules have backward hooks"
INPUT_GRADIENT = "an input takes a gradient"
ASKED_GRADIENTS = "the script takes gradients by torch.autograd.grad"
FEATURE_HOOKED = "its forward registers hooks on tensors"
REPLAYS = "CUDA graph calls"

Call = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
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
        self._steps = 0  # of optimizers, with gradients of the root's parameters
        self._called_at = -1
        self._safe_steps = 0
        self._shapes: Shapes | None = None
        self._gradients = Gradients()
        self._refused = False
        self._replays = 0  # of any CUDA graph
        self._inside = False  # a watched call
        self._replaying: tuple[Module, Args, Kwargs] | None = None
        self._look: Look | None = None  # before the call that is being made

    def install(self, undo: ExitStack) -> None:
        """Count the optimizers' steps and the replays."""
        undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        patching.wrap(torch.cuda.CUDAGraph, "replay", self._counting, undo)

    def refuse(self, reason: str) -> None:
        """Use no CUDA graphs from now on."""
        if not self._refused:
            self._refused = True
            self._recorder.note(f"{WITHOUT_GRAPHS}: {reason}")

    def on_compiling(self) -> None:
        """Look again at what the call leaves: code that is compiled now has not run before."""
        if self._replaying is not None and self._look is None:
            self._look = Look(*self._replaying)

    def on_hook(self) -> None:
        """Refuse hooks of the forward's on its own tensors: they get gradients unseen."""
        if self._inside:
            self.refuse(FEATURE_HOOKED)

    def call(self, plain: Call, module: Module, args: Args, kwargs: Kwargs) -> Any:
        """Make a call of the root, by a CUDA graph if it is safe.

        Args:
            plain: The root's function, compiled without CUDA graphs.
            module: The root.
            args: The call's arguments.
            kwargs: The same, by name.
        """
        if not self._watches(module, args, kwargs):
            return plain(module, *args, **kwargs)
        self._inside = True
        try:
            if self._safe_steps > PROBATION_STEPS:
                return self._replay(module, args, kwargs)
            return self._try(plain, module, args, kwargs)
        finally:
            self._inside = False

    def _try(self, plain: Call, module: Module, args: Args, kwargs: Kwargs) -> Any:
        """Make a call of the probation."""
        # What only the first call leaves, such as a table, is there before the first replay.
        self._look = Look(module, args, kwargs) if self._safe_steps > 1 else None
        output = plain(module, *args, **kwargs)
        self._look_back(module, output)
        return output

    def _watches(self, module: Module, args: Args, kwargs: Kwargs) -> bool:
        """True if this call is one of those that may be replays after the probation."""
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
        return True

    def _replay(self, module: Module, args: Args, kwargs: Kwargs) -> Any:
        """Make the call by a CUDA graph, and copy its output out of the graph's memory."""
        before = self._replays
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        self._replaying = module, args, kwargs
        try:
            output = self._graphed(module, *args, **kwargs)
        finally:
            self._replaying = None
        # inductor may have recorded none, and doesn't replay what it runs for the first time.
        self._recorder.counts[REPLAYS] += self._replays > before
        # No replay comes after a refusal, so that what was left here stays as it is.
        self._look_back(module, output)
        return map_tensors(output, Tensor.clone)

    def _counting(self, original: Any) -> Any:
        @functools.wraps(original)
        def replay(graph: Any) -> None:
            self._replays += 1
            original(graph)

        return replay

    def _look_back(self, module: Module, output: Any) -> None:
        look, self._look = self._look, None
        if look is not None and (reason := look.left(module, output)):
            self.refuse(reason)

    def _danger(self, module: Module) -> str:
        if self._called_at == self._steps:
            return f"{type(module).__name__} {CALLED_AGAIN}"
        parameters = list(parameters_of(module))
        replay = self._safe_steps >= PROBATION_STEPS
        if not self._gradients.release(parameters, replay=replay):
            return KEPT_GRADIENTS
        # Hooks that come later are noticed by `watch_hooks`.
        return "" if replay or not _has_backward_hooks(module) else BACKWARD_HOOKS

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or self._refused:
            return
        if self._gradients.note(optimizer):
            self._steps += 1


def _leak(module: Module, args: Args, kwargs: Kwargs) -> str:
    """Return how the script could keep gradients unseen, in a graph's memory; empty if it can't."""
    if any(p._backward_hooks or _accumulated_hooks(p) for p in parameters_of(module)):
        return HOOKED
    if any(tensor.requires_grad for tensor in tensors_in((args, kwargs))):
        return INPUT_GRADIENT
    return ""


def _has_backward_hooks(module: Module) -> bool:
    return any(part._backward_hooks or part._backward_pre_hooks for part in Module.modules(module))


def _accumulated_hooks(parameter: Any) -> Any:
    return getattr(parameter, "_post_accumulate_grad_hooks", None)  # torch 2.1


def _shapes(args: Args, kwargs: Kwargs) -> Shapes:
    """Return the shapes and dtypes of tensors, and the numbers, for which a graph is made."""
    found: list[Any] = []

    def see(value: Any) -> Any:
        found.append((value.shape, value.dtype))
        return value

    map_tensors((args, kwargs), see)
    numbers = [v for v in (*args, *kwargs.values()) if isinstance(v, bool | int | float | str)]
    return (*found, *numbers)


def watch_gradients(asked: Callable[[], None], hooked: Callable[[], None], undo: ExitStack) -> None:
    """Notice when the script takes gradients other than those that parameters have.

    Args:
        asked: Called before ``torch.autograd.grad``.
        hooked: Called before a hook is registered on a tensor.
        undo: Takes the inverse.
    """
    patching.wrap(
        torch.autograd, "grad", functools.partial(_first, asked), undo, Differentiating.CUDA_GRAPHS
    )
    patching.wrap(Tensor, "register_hook", functools.partial(_first, hooked), undo, Hooking.COMPILE)


def _first(listen: Callable[[], None], original: Any) -> Any:
    """Return a function that calls ``listen`` and then torch's, unless it is being traced."""

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            listen()
        return original(*args, **kwargs)

    pass_over(watched)
    return watched
