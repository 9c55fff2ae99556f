"""Fused optimizer kernels: switched on during each step, and off again after it.

Outside of ``step`` the optimizer is as the script made it: ``defaults``, ``param_groups`` and
``state_dict()`` hold the script's own values. So runs with and without fasttrain can load each
other's checkpoints.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fasttrain.model.decision import Decision
from fasttrain.model.outcome import State
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.loop import Arguments, closure_of, followed
from fasttrain.shim.hooks.outcome_recorder import Lever, OutcomeRecorder, Shared
from fasttrain.shim.hooks.seams import Training, then
from fasttrain.shim.process.callsite import call_site

FUSIBLE: tuple[type[Optimizer], ...] = (Adam, AdamW, SGD, Adagrad)
# Arguments that choose an implementation; a script that sets one has chosen itself.
OWN_CHOICES = ("fused", "foreach", "capturable", "differentiable")
PACKAGE = "fasttrain."
NO_KERNEL = "has no fused kernel for it"
WRONG_NUMBERS = "computes wrong numbers"
NOT_SHARDED = "has no fused kernel for shards"
# Source: torch/distributed/tensor/_ops/_pointwise_ops.py, torch 2.13: elsewhere a DTensor raises.
FUSIBLE_SHARDED: tuple[type[Optimizer], ...] = (Adam, AdamW)
NOT_DENSE = "a parameter doesn't fill a block of memory"
STATE_OTHERWISE = "its state lies in memory in another order than its parameters"
GRADIENT_OTHERWISE = "a gradient lies in memory in another order than its parameter"
HOOKED = "hooks of the script's before its step may change gradients or groups"
LATE_GRADIENT = (
    "a parameter's first gradient came after the others' (torch's own step was used then)"
)
SGD_ITEM_BYTES = 4  # on a CPU torch 2.13's fused SGD is wrong for smaller numbers, such as bf16
Strides = tuple[int, ...] | None  # None for tensors without any, such as sparse ones


class _Known:
    """The lever's state of one optimizer of the script."""

    __slots__ = ("fuse", "hooked", "kinds", "left", "site", "steps_on_device", "strides")

    def __init__(self, site: str) -> None:
        self.site = site
        self.strides: list[Strides] | None = None  # of the parameters when it was judged
        self.kinds: list[tuple[torch.dtype, type]] = []
        self.fuse = False
        self.hooked = False
        self.steps_on_device = False
        self.left: set[str] = set()  # why some steps were not fused


class OptimizerLever:
    """Turns ``fused`` on around each step of the optimizers that have such a kernel.

    Args:
        recorder: Records what becomes of the lever.
        leave: True if another lever makes an optimizer's steps.
    """

    def __init__(
        self, recorder: OutcomeRecorder, leave: Callable[[Optimizer], bool] = lambda _: False
    ) -> None:
        self.recorder = recorder
        self._leave = leave
        self._known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
        self._hooks = ExitStack()  # those on the script's own optimizers
        self._on = True

    def install(self, undo: ExitStack) -> None:
        """Hook optimizer construction and steps."""
        undo.callback(self._hooks.close)
        made = then(self._on_made, even_traced=True)
        patching.wrap(Optimizer, "__init__", made, undo, Training.OPTIMIZER)
        undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self.recorder.settle(State.ARMED, "no optimizer made a step")

    def switch(self, *, on: bool) -> None:
        """Make the next steps by fused kernels, or as the script has them."""
        self._on = on
        for optimizer, known in self._known.items() if not on else ():
            # Else torch's own step would read the counters from the device, one by one.
            if known.steps_on_device:
                _move_step_counters_back(optimizer)
                known.steps_on_device = False

    @contextmanager
    def around_step(self, copied: Optimizer) -> Iterator[None]:
        """Have a copy of an optimizer, which has no hooks, make its step by fused kernels."""
        if not (own_choice(copied) or unfusible(copied)):
            _move_step_counters(copied)
            strides = iter(_all_strides(copied))
            for group in copied.param_groups:
                group["fused"] = not _unfusible_gradients(copied, group, strides) or None
        yield

    def refresh(self) -> None:
        """Do nothing: every step is counted when it is made."""

    def _on_made(self, optimizer: Optimizer) -> None:
        self._known[optimizer] = _Known(call_site())

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any
    ) -> Arguments | None:
        if torch.compiler.is_compiling():
            return None  # the script compiles its step: dynamo must find nothing to trace here
        if not self._on or self._leave(optimizer):
            return None
        known = self._known.get(optimizer)
        if known is None:  # it was unpickled, without its constructor
            known = self._known[optimizer] = _Known(call_site())
        if not self._may_fuse(optimizer, known):
            return None
        if _hooked(optimizer):  # they run after this, and see and leave the groups as they are
            self._leave_step(optimizer, known, HOOKED)
            return None
        if not known.steps_on_device:
            _move_step_counters(optimizer)
            known.steps_on_device = True
        if closure_of(args, kwargs) is None:
            self._fuse(optimizer, known)
            return None
        return followed(args, kwargs, lambda: self._fuse_after_closure(optimizer, known))

    def _may_fuse(self, optimizer: Optimizer, known: _Known) -> bool:
        """True if a step can be fused, judged again whenever parameters are of another kind."""
        with torch._C.DisableTorchFunction():  # the script's would see what is asked for
            strides = _all_strides(optimizer)
            kinds = [(p.dtype, type(p)) for p in _parameters(optimizer)]
            if strides != known.strides or kinds != known.kinds:
                known.strides, known.kinds = strides, kinds
                self._judge(optimizer, known)
        return known.fuse

    def _fuse_after_closure(self, optimizer: Optimizer, known: _Known) -> None:
        """Fuse a step unless its closure, such as a model's first call, has changed parameters."""
        if self._may_fuse(optimizer, known):
            self._fuse(optimizer, known)

    def _fuse(self, optimizer: Optimizer, known: _Known) -> None:
        """Switch the kernel on for this step, in the groups whose gradients it can take."""
        strides = iter(known.strides or ())
        for group in optimizer.param_groups:
            with torch._C.DisableTorchFunction():
                reason = _unfusible_gradients(optimizer, group, strides)
            if reason:
                self._leave_step(optimizer, known, reason)
                continue
            group["fused"] = True
            if not known.hooked:
                self._start(optimizer, known)

    def _leave_step(self, optimizer: Optimizer, known: _Known, reason: str) -> None:
        """Record, once for each reason, that torch's own kernels make a step."""
        if reason not in known.left:
            known.left.add(reason)
            self.recorder.pass_over(_name(optimizer, known), reason)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        known = self._known.get(optimizer)
        if known is not None and known.fuse:
            fused = [group for group in optimizer.param_groups if group["fused"]]
            for group in fused:
                group["fused"] = None
            self.recorder.counts["steps"] += bool(fused)

    def _judge(self, optimizer: Optimizer, known: _Known) -> None:
        """Decide whether to fuse an optimizer's steps: at first, and when its parameters change."""
        known.fuse = False
        if choice := own_choice(optimizer):
            if self.recorder.state in (State.ARMED, State.CEDED):
                self.recorder.cede(
                    f"the script chose {choice}", type(optimizer).__name__, known.site
                )
            else:
                self.recorder.note(
                    f"{_name(optimizer, known)} left to the script: it chose {choice}"
                )
        elif reason := unfusible(optimizer):
            self.recorder.pass_over(_name(optimizer, known), reason)
        else:
            known.fuse = True

    def _start(self, optimizer: Optimizer, known: _Known) -> None:
        """Record an optimizer's first fused step, and keep its checkpoints the script's own."""
        known.hooked = True
        self._keep_checkpoints_native(optimizer, known)
        if self.recorder.state is State.CEDED:
            self.recorder.settle(State.ARMED)
        self.recorder.apply(type(optimizer).__name__, known.site)

    def _keep_checkpoints_native(self, optimizer: Optimizer, known: _Known) -> None:
        """Save and load step counters as the script alone would."""

        def after_save(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            # state_dict() shares its inner dictionaries with the optimizer, so changed ones are
            # copies. If a step raised, `fused` is still on, which only a script may save.
            if not known.fuse:
                return state_dict
            for group in state_dict["param_groups"]:
                group["fused"] = None
            state = state_dict["state"]
            state_dict["state"] = {key: _native_step(value) for key, value in state.items()}
            return state_dict

        def after_load(_: Optimizer) -> None:
            known.steps_on_device = False
            known.strides = None  # judge again: the loaded groups may choose an implementation

        self._hooks.callback(optimizer.register_state_dict_post_hook(after_save).remove)
        self._hooks.callback(optimizer.register_load_state_dict_post_hook(after_load).remove)


def _name(optimizer: Optimizer, known: _Known) -> str:
    return f"{type(optimizer).__name__} ({known.site})"


def _hooked(optimizer: Optimizer) -> bool:
    """True if a hook that isn't fasttrain's runs before the optimizer's steps."""
    of_all = _global_optimizer_pre_hooks.values()
    hooks = chain(optimizer._optimizer_step_pre_hooks.values(), of_all)
    return any(not str(getattr(hook, "__module__", "")).startswith(PACKAGE) for hook in hooks)


def own_choice(optimizer: Optimizer) -> str:
    """Return the implementation that the script chose, such as ``foreach=True``; empty if none.

    A class's default, or a value that it sets without taking it as an argument, is no choice.
    """
    arguments = inspect.signature(type(optimizer).__init__).parameters
    for group in optimizer.param_groups:
        for name in OWN_CHOICES:
            value = group.get(name)
            # capturable and differentiable are off as False, fused and foreach as None
            chosen = value or (value is False and name in OWN_CHOICES[:2])
            if chosen and name in arguments and value != arguments[name].default:
                return f"{name}={value}"
    return ""


def unfusible(optimizer: Optimizer) -> str:
    """Return the reason why an optimizer can't take a fused step; empty if it can."""
    kind = type(optimizer)
    if kind not in FUSIBLE:
        return f"torch {NO_KERNEL}"
    if "fused" not in inspect.signature(kind.__init__).parameters:
        return f"torch {torch.__version__} {NO_KERNEL}"
    if any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
        return "its learning rate is a tensor"
    if reason := next(
        (r for p in _parameters(optimizer) if (r := _unfusible_parameter(kind, p))), ""
    ):
        return reason
    if any(_laid_out_otherwise(p, state) for p, state in _states(optimizer)):
        return STATE_OTHERWISE
    return ""


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _states(optimizer: Optimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield the parameters that have a state, each with it.

    A script may keep other things in ``optimizer.state``, which then travel in its checkpoints.
    """
    for key, state in optimizer.state.items():
        if isinstance(key, Tensor) and isinstance(state, dict):
            yield key, state


def _unfusible_parameter(kind: type[Optimizer], parameter: Tensor) -> str:
    # Source: torch/utils/_foreach_utils.py, torch 2.13
    devices = torch.utils._foreach_utils._get_fused_kernels_supported_devices()
    device = parameter.device.type
    operator = f"aten::_fused_{kind.__name__.lower()}_"
    refused = device == "cuda" and _refuses_cuda(kind)
    if device not in devices or refused or not _has_kernel(operator, device):
        return f"torch has no fused kernel for {device}"
    if kind not in FUSIBLE_SHARDED and hasattr(parameter, "placements"):
        return f"torch {NOT_SHARDED}"
    if not parameter.is_floating_point():
        return f"a parameter is {str(parameter.dtype).removeprefix('torch.')}"
    if kind is SGD and device == "cpu" and parameter.element_size() < SGD_ITEM_BYTES:
        kernel = f"torch {torch.__version__}'s fused SGD {WRONG_NUMBERS}"
        return f"{kernel} for {str(parameter.dtype).removeprefix('torch.')} on a CPU"
    strides = _strides(parameter)
    if strides is None or not _dense(parameter.shape, strides):
        return NOT_DENSE
    return ""


@functools.cache
def _has_kernel(operator: str, device: str) -> bool:
    """True if torch has an operator for a device: early fused Adagrad ran on CPUs only."""
    # The kernels of an extension's device are under the one key that torch reserves for it.
    named = device == torch._C._get_privateuse1_backend_name()
    key = "PrivateUse1" if named else device.upper()
    known = torch._C._parse_dispatch_key(key)  # None for a device without a key
    return known is None or torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


def _refuses_cuda(kind: type[Optimizer]) -> bool:
    """True if a class raises for parameters on CUDA: torch 2.11's Adagrad, which has a kernel.

    Source: ``_init_group`` in ``torch/optim/adagrad.py`` and ``_device_dtype_check_for_fused``,
    which it calls with ``cuda_unsupported=True``.
    """
    code: Any = getattr(vars(kind).get("_init_group"), "__code__", None)
    return code is not None and "cuda_unsupported" in str(code.co_consts)


def _strides(tensor: Tensor) -> Strides:
    try:
        return tensor.stride()
    except (RuntimeError, ValueError):  # sparse, nested; a lazy module's, before its first call
        return None


def _all_strides(optimizer: Optimizer) -> list[Strides]:
    return [_strides(p) for group in optimizer.param_groups for p in group["params"]]


def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """True if a tensor's elements fill a block of memory without gaps, in any order."""
    size = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length != 1 and stride != size:
            return 0 in shape
        size *= length
    return True


def _same_order(shape: tuple[int, ...], one: Strides, other: Strides) -> bool:
    """True if two dense tensors have their elements in the same order in memory."""
    if one is None or other is None:
        return one == other
    return all(a == b or n == 1 for n, a, b in zip(shape, one, other, strict=True))


def _laid_out_otherwise(parameter: Tensor, state: dict[str, Any]) -> bool:
    shape, strides = parameter.shape, _strides(parameter)
    return any(
        isinstance(value, Tensor)
        and value.shape == shape
        and not _same_order(shape, _strides(value), strides)
        for value in state.values()
    )


def _unfusible_gradients(
    optimizer: Optimizer, group: dict[str, Any], strides: Iterator[Strides]
) -> str:
    """Return why a group can't take a fused step with the gradients that it has; empty if it can.

    The kernels go through memory in order, and on a CPU don't check that all tensors have the
    parameter's order.

    Args:
        optimizer: The optimizer of the group.
        group: The group.
        strides: An iterator at the strides of the group's first parameter; it is advanced to the
            next group's.
    """
    reason, buffers = "", set()
    with_buffers = isinstance(optimizer, SGD) and group["momentum"] != 0
    for parameter, expected in zip(group["params"], strides, strict=False):
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout is not torch.strided:
            reason = "its gradients are sparse"
        elif (own := gradient.stride()) != expected and not _same_order(
            gradient.shape, own, expected
        ):
            reason = GRADIENT_OTHERWISE
        elif with_buffers:
            # Source: torch/optim/sgd.py, torch 2.13: _fused_sgd takes either all or none
            buffers.add(optimizer.state[parameter].get("momentum_buffer") is None)
    return reason or (LATE_GRADIENT if len(buffers) > 1 else "")


def _move_step_counters(optimizer: Optimizer) -> None:
    """Move ``state["step"]`` to the parameter's device in fp32, as the fused kernel reads it."""
    for parameter, state in _states(optimizer):
        step = state.get("step")
        if isinstance(step, Tensor) and (
            step.device != parameter.device or step.dtype is not torch.float32
        ):
            state["step"] = step.to(parameter.device, torch.float32)


def _move_step_counters_back(optimizer: Optimizer) -> None:
    """Keep ``state["step"]`` as torch does without fused kernels."""
    for state in optimizer.state.values():
        if isinstance(state, dict):
            state.update(_native_step(state))


def _native_step(state: Any) -> Any:
    """Return a parameter's state with its step counter as torch keeps it without fused kernels."""
    step = state.get("step") if isinstance(state, dict) else None
    if not isinstance(step, Tensor):
        return state
    # Source: torch/optim/optimizer.py, torch 2.13, _get_scalar_dtype
    double = torch.get_default_dtype() is torch.float64
    native = step.to("cpu", torch.float64 if double else torch.float32)
    return state if native is step else {**state, "step": native}


def build(shared: Shared, _decision: Decision[Any], recorder: OutcomeRecorder) -> list[Lever]:
    """Build the lever, which leaves out what others step."""
    elsewhere = shared.stepped_elsewhere
    return [OptimizerLever(recorder, leave=lambda own: any(takes(own) for takes in elsewhere))]
