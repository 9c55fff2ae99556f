"""Dynamic loss scaling for fp16, which the script doesn't see.

Each backward pass starts from gradients times the scale, and divides what it has left in ``.grad``
before it returns. So losses, ``.grad``, clipping and accumulation are the same as without it. The
scale is a power of two, so that multiplying and dividing are exact. If a gradient is inf or NaN,
the step runs without gradients, and every optimizer then changes nothing. Fused kernels are told
instead, by a tensor that the host doesn't read (`device_steps`).

`torch.amp.GradScaler` does the arithmetic: its tensors, its unscaling kernel, its growth and
back-off. Its ``step`` is not used, because the script calls the optimizer's own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fasttrain.model.decision import Decision
from fasttrain.model.levers import Amp
from fasttrain.model.outcome import State
from fasttrain.model.vendors import VENDORS
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.containers import map_tensors
from fasttrain.shim.hooks.gradients import (
    Hook,
    ends_of,
    inputs_of,
    named_as,
    wrap_module_hooks,
    wrap_tensor_hooks,
)
from fasttrain.shim.hooks.loop import Arguments, begins_with_closure, closure_of, followed
from fasttrain.shim.hooks.outcome_recorder import Lever, OutcomeRecorder, Shared
from fasttrain.shim.hooks.roots import Root, RootCalls
from fasttrain.shim.hooks.seams import Differentiating, Hooking, Training, then
from fasttrain.shim.levers.loss_scaling.device_steps import Tally, skips_by_itself
from fasttrain.shim.levers.loss_scaling.gradients import (
    Gradients,
    closure_refused,
    inputs_refused,
    require_infinity,
    step_refused,
)
from fasttrain.shim.process.refusal import refuse

# Passes the script's gradient hooks the gradients that they would get without loss scaling.
#
# Hooks that clip, mask or record gradients run inside the backward pass, where gradients are
# scaled. So these are divided by the scale before a hook and multiplied after it, which is exact:
# the scale is a power of two.
#
# Hooks on autograd nodes (``grad_fn.register_hook``) get scaled gradients, because torch itself
# registers such hooks.


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


# Dynamic loss scaling for fp16, which the script doesn't see.


# autograd.grad returns its result to the script at once, and no later step can skip an overflow. So
# its scale starts lower than GradScaler's 2**16, and backs off until the result is finite.
FIRST_GRAD_SCALE = 2.0**10
GRAD_BACKOFF = 2.0**-5


class LossScaling:
    """Scales backward passes and skips steps that overflowed."""

    def __init__(
        self, decision: Decision[Amp], recorder: OutcomeRecorder, roots: RootCalls
    ) -> None:
        self.recorder = recorder
        self._roots = roots
        # Made before the amp lever watches for the script's own GradScaler.
        self._scaler = GradScaler(VENDORS[decision.value.device].torch_type)
        self._gradients = Gradients()
        self._hooks = GradientHooks()
        self._stepped: set[int] = set()  # optimizers, by id, since the last backward pass
        self._closure_of = ""  # the optimizer whose step runs a closure right now
        self._grad_scale = FIRST_GRAD_SCALE
        self._withheld: weakref.WeakKeyDictionary[Optimizer, list[tuple[Tensor, Tensor]]] = (
            weakref.WeakKeyDictionary()
        )
        self._told: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # that have our found_inf
        self._tally = Tally(self._scaler.get_scale())
        self._late_hooks = ExitStack()

    def install(self, undo: ExitStack) -> None:
        """Take over the two ways into autograd, and hook the optimizers."""
        self._roots.on_discover.append(self._gradients.add_root)
        undo.callback(self._roots.on_discover.remove, self._gradients.add_root)
        self._gradients.install(undo)
        self._watch_optimizers(undo)
        self._hooks.install(undo)
        self._wrap("backward", self._backward, undo)
        self._wrap("grad", self._grad, undo)
        undo.callback(self._late_hooks.close)
        undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self.recorder.on_reset.append(self._tally.reset)
        self.recorder.settle(State.ARMED, "no backward pass went through a module in fp16")

    def hook_steps(self) -> None:
        """Hook the beginnings of steps: after all levers, one of which may make a step fused."""
        if self.recorder.live:
            hook = register_optimizer_step_pre_hook(self._before_step)
            self._late_hooks.callback(hook.remove)

    def refresh(self) -> None:
        """Record the scale, and whether the script manages precision itself."""
        if self._roots.region is None and self.recorder.state is State.ARMED:
            self.recorder.cede("the script manages precision itself")
        self._count(wait=False)

    def wait(self) -> None:
        """Wait for the counts that the device still has, before the last report."""
        self._count(wait=True)

    def _count(self, *, wait: bool) -> None:
        scale = self._scaler._scale
        if scale is None:
            return
        counted, counts = self._tally.read(scale, wait=wait), self.recorder.counts
        counts["scale"] = int(counted.scale)
        for name, count in (("steps", counted.made), ("skipped steps", counted.skipped)):
            if count:
                counts[name] = count

    def state(self) -> dict[str, Any]:
        """Return what a resumed process needs, after the scale was updated by the last steps."""
        self._gradients.update(self._scaler, self._stepped)
        self._stepped = set()
        return {"scaler": self._scaler.state_dict(), "slope": self._grad_scale}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._scaler.load_state_dict(state["scaler"])
        self._grad_scale = state["slope"]
        self._stepped = set()
        self._gradients.forget()

    @property
    def scale(self) -> float:
        """The scale as of the last steps that the host knows of; nothing waits for it."""
        scale = self._scaler._scale
        if scale is None:
            return float(self._scaler.get_scale())
        return self._tally.read(scale, wait=False).scale

    def _wrap(self, name: str, wrapper: Callable[..., Any], undo: ExitStack) -> None:
        def wrapped(original: Any) -> Any:
            return functools.wraps(original)(functools.partial(wrapper, original))

        patching.wrap(torch.autograd, name, wrapped, undo, Differentiating.LOSS_SCALING)

    def _watch_optimizers(self, undo: ExitStack) -> None:
        gradients, place = self._gradients, Training.LOSS_SCALING
        made = then(gradients.add_optimizer, even_traced=True)
        patching.wrap(Optimizer, "__init__", made, undo, place)
        patching.wrap(Optimizer, "zero_grad", then(gradients.on_zero_grad), undo, place)
        zeroed = then(lambda _: gradients.on_zero_grad(None))
        patching.wrap(Module, "zero_grad", zeroed, undo, place)

    def _backward(
        self,
        original: Callable[..., Any],
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        outputs = ends_of(tensors)
        inputs = None if inputs is None else inputs_of(inputs)
        options = (retain_graph, create_graph, grad_variables, inputs)
        if not self._scales(outputs):
            if self._hooks.scale is not None:
                self._gradients.begin_inside(outputs)
            original(outputs, grad_tensors, *options)
            return
        if any(isinstance(tensor, Tensor) and not tensor.is_leaf for tensor in inputs or ()):
            refuse(inputs_refused())
        scale = self._begin(outputs[0])
        if create_graph:
            # The script may differentiate these gradients again. Dividing them in place would be
            # missing in their graph, so this backward pass isn't scaled.
            scale = torch.ones_like(scale)
        seeds = _scaled(outputs, grad_tensors, scale)
        self._gradients.begin(outputs, scale)
        self._hooks.scale = scale
        try:
            original(outputs, seeds, *options)
        finally:
            self._hooks.scale = None
            self._gradients.unscale(self._scaler, scale)
        self.recorder.apply("backward pass", self._where())
        self.recorder.counts["backward passes"] += 1

    def _grad(
        self,
        original: Callable[..., Any],
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        ends, of = ends_of(outputs), inputs_of(inputs)
        if not self._scales(ends):
            found = original(ends, of, grad_outputs, retain_graph, *args, **kwargs)
            return named_as(inputs, found)
        self.recorder.apply("autograd.grad", self._where())
        vectors = None if grad_outputs is None else ends_of(grad_outputs)
        while True:
            # Not torch.tensor(): a copy from the host, for which it would wait.
            scale = torch.full((), self._grad_scale, device=ends[0].device)
            seeds = _scaled(ends, vectors, scale)
            retained = True  # for another try; the graph is freed with the outputs
            self._gradients.begin_grad(ends)
            self._hooks.scale, done = scale, False
            try:
                gradients = original(ends, of, seeds, retained, *args, **kwargs)
                done = self._grad_scale <= 1.0 or _finite(gradients)
            finally:
                self._hooks.scale = None
                self._gradients.finish_grad(self._scaler, scale, drop=not done)
            if done:
                unscaled = (None if g is None else g / self._grad_scale for g in gradients)
                return named_as(inputs, tuple(unscaled))
            self._grad_scale = max(1.0, self._grad_scale * GRAD_BACKOFF)

    def _scales(self, outputs: Sequence[Any]) -> bool:
        """True if the backward pass from these outputs is to be scaled."""
        roots = self._roots
        if roots.region is None or not roots.lowered or not self._scaler.is_enabled():
            return False  # the script manages precision itself, or nothing ran in fp16
        if torch._C._current_graph_task_id() != -1:
            return False  # inside another backward pass, whose gradients are scaled already
        if self._closure_of:
            refuse(closure_refused(self._closure_of))
        if _batched():
            self.recorder.note(f"gradients inside torch.func.vmap aren't scaled ({self._where()})")
            return False  # whether a gradient is finite can't be read inside vmap
        if not all(isinstance(output, Tensor) for output in outputs):
            self.recorder.note(f"gradients from edges of the graph aren't scaled ({self._where()})")
            return False
        return bool(outputs)

    def _begin(self, output: Tensor) -> Tensor:
        """Return the scale, updated by the steps since the last backward pass."""
        scaler: Any = self._scaler
        if scaler._scale is None:
            require_infinity(output.device.type)
            scaler._lazy_init_scale_growth_tracker(output.device)
        else:
            self._gradients.update(scaler, self._stepped)
        self._stepped = set()
        scale: Tensor = scaler._scale
        return scale

    def _where(self) -> str:
        root: Root | None = self._roots.last
        return root.where if root is not None else ""

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any
    ) -> Arguments | None:
        if torch.compiler.is_compiling():
            return None
        self._take_back(optimizer)  # from a step that raised, after which no hook is called
        if self._roots.region is None:
            return None
        if closure_of(args, kwargs) is not None:
            if begins_with_closure(optimizer):
                return followed(args, kwargs, lambda: self._check(optimizer))
            self._closure_of = type(optimizer).__name__
        self._check(optimizer)
        return None

    def _check(self, optimizer: Optimizer) -> None:
        """Have a step change nothing if one of its gradients overflowed."""
        if self._scaler._scale is None:
            return
        if self._hooks.scale is not None:
            refuse(step_refused(type(optimizer).__name__))
        self._stepped.add(id(optimizer))
        found = self._gradients.found(optimizer)
        if found and self._tells(optimizer, found):
            return
        if not any(bool(value.item()) for value in found):  # waits for the device
            self._tally.made += 1
            return
        self._tally.skipped += 1
        self._withheld[optimizer] = _withhold(optimizer)

    def _tells(self, optimizer: Optimizer, found: list[Tensor]) -> bool:
        """Tell a fused step itself whether a gradient overflowed, if it can be told."""
        # A copy from another device would be one more wait, or could come too late.
        scale = self._scaler._scale
        if scale is None or any(value.device != scale.device for value in found):
            return False
        overflow = functools.reduce(torch.maximum, found)  # exactly 1: step counters are put back
        if not skips_by_itself(optimizer, overflow):
            return False
        optimizer.found_inf = overflow  # type: ignore[attr-defined]
        self._told.add(optimizer)
        self._tally.add(overflow)
        return True

    def _take_back(self, optimizer: Optimizer) -> None:
        if optimizer in self._told:
            self._told.discard(optimizer)
            vars(optimizer).pop("found_inf", None)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any) -> None:
        if closure_of(args, kwargs) is not None:  # else a step inside the closure of another
            self._closure_of = ""
        self._take_back(optimizer)
        for parameter, gradient in self._withheld.pop(optimizer, ()):
            parameter.grad = gradient


def _scaled(outputs: tuple[Any, ...], given: Any, scale: Tensor) -> list[Any]:
    """Return the gradients to start from, times the scale."""
    seeds = (None,) * len(outputs) if given is None else ends_of(given)
    if len(seeds) != len(outputs):
        return list(seeds)  # torch raises its own error
    return [_scaled_seed(o, seed, scale) for o, seed in zip(outputs, seeds, strict=True)]


def _scaled_seed(output: Tensor, seed: Tensor | None, scale: Tensor) -> Tensor | None:
    if seed is None:
        if output.numel() != 1 or not output.requires_grad:
            return None  # torch raises its own error
        seed = torch.ones_like(output)
    return seed * scale.to(seed.device, seed.dtype)


def _finite(gradients: Sequence[Tensor | None]) -> bool:
    """True if all gradients are finite; waits once for each device."""
    of_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        if gradient is not None:
            of_device.setdefault(gradient.device, []).append(gradient.isfinite().all())
    return all(bool(torch.stack(finite).all()) for finite in of_device.values())


def _withhold(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    """Remove an optimizer's gradients and return them, to be put back after the step."""
    withheld = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                withheld.append((parameter, parameter.grad))
                parameter.grad = None
    return withheld


def _batched() -> bool:
    """True inside ``torch.func.vmap``."""
    functorch: Any = torch._C._functorch
    stack = functorch.get_interpreter_stack() or ()
    return any(level.key() == functorch.TransformType.Vmap for level in stack)


def build(shared: Shared, decision: Decision[Amp], _amp: OutcomeRecorder) -> list[Lever]:
    """Build the lever, which has a line of its own in the receipt."""
    explicit = decision.source.explicit
    recorder = shared.companion("loss_scaling", "dynamic", decision, explicit=explicit)
    lever = LossScaling(decision, recorder, shared.roots)
    shared.lever_state.states["loss scaling"] = lever
    shared.loss_scale = lambda: lever.scale
    shared.on_installed.append(lever.hook_steps)
    shared.on_final.append(lever.wait)
    return [lever]
