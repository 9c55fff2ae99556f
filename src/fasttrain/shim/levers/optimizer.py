"""Fused optimizer kernels: switched on for the length of each step, and off again behind it.

Outside of ``step`` the optimizer is what the script made: ``defaults``, ``param_groups`` and
``state_dict()`` hold the script's own values, so that checkpoints interchange both ways.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fasttrain.shim.callsite import call_site
from fasttrain.shim.closures import Arguments, closure_of, followed
from fasttrain.shim.ledger import Ledger
from fasttrain.spec.outcome import State

FUSIBLE: tuple[type[Optimizer], ...] = (Adam, AdamW, SGD, Adagrad)
# What a script can ask of an implementation; any of them means that it chose for itself.
OWN_CHOICES = ("fused", "foreach", "capturable", "differentiable")


class _Known:
    """What is known of one optimizer of the script."""

    __slots__ = ("fuse", "hooked", "matrices", "site", "size", "steps_on_device")

    def __init__(self, site: str) -> None:
        self.site = site
        self.size = -1
        self.fuse = False
        self.hooked = False
        self.steps_on_device = False
        self.matrices: list[Tensor] = []


class OptimizerLever:
    """Turns ``fused`` on around each step of the optimizers that have such a kernel.

    Args:
        ledger: Takes what becomes of it.
        leave: Whether an optimizer's steps are made by another lever.
    """

    def __init__(
        self, ledger: Ledger, leave: Callable[[Optimizer], bool] = lambda _: False
    ) -> None:
        self.ledger = ledger
        self._leave = leave
        self._known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
        self._hooks = ExitStack()  # those on the script's own optimizers

    def install(self, undo: ExitStack) -> None:
        """Hook optimizer construction and steps."""
        undo.callback(self._hooks.close)
        self._watch_construction(undo)
        undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self.ledger.settle(State.ARMED, "no optimizer made a step")

    def refresh(self) -> None:
        """Nothing is pending: every step is counted as it happens."""

    def _watch_construction(self, undo: ExitStack) -> None:
        original: Any = Optimizer.__init__

        @functools.wraps(original)
        def __init__(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(optimizer, *args, **kwargs)
            self._known[optimizer] = _Known(call_site())

        undo.callback(setattr, Optimizer, "__init__", original)
        setattr(Optimizer, "__init__", __init__)  # noqa: B010

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any
    ) -> Arguments | None:
        if torch.compiler.is_compiling():
            return None  # the script compiles its step: dynamo has to find nothing here to trace
        if self._leave(optimizer):
            return None
        known = self._known.get(optimizer)
        if known is None:  # made by unpickling
            known = self._known[optimizer] = _Known(call_site())
        groups = optimizer.param_groups
        size = 0
        for group in groups:
            size += len(group["params"])
        if size != known.size:
            known.size = size
            self._judge(optimizer, known)
        with_closure = known.matrices and closure_of(args, kwargs) is not None
        if not known.fuse or not (with_closure or self._stays_fused(optimizer, known)):
            return None
        if not known.steps_on_device:
            _move_step_counters(optimizer)
            known.steps_on_device = True
        for group in groups:
            group["fused"] = True
        if not with_closure:
            return None
        return followed(args, kwargs, lambda: self._stays_fused(optimizer, known))

    def _stays_fused(self, optimizer: Optimizer, known: _Known) -> bool:
        """Look at the gradients of this very step, and leave the optimizer alone if they differ."""
        if not _has_sparse_gradients(known):
            if not known.hooked:
                self._start(optimizer, known)
            return True
        for group in optimizer.param_groups:
            if group.get("fused"):
                group["fused"] = None
        self._keep(optimizer, known, "its gradients are sparse")
        return False

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        known = self._known.get(optimizer)
        if known is not None and known.fuse:
            for group in optimizer.param_groups:
                group["fused"] = None
            self.ledger.counts["steps"] += 1

    def _judge(self, optimizer: Optimizer, known: _Known) -> None:
        """Decide once, and again whenever parameters were added."""
        known.fuse = False
        if choice := own_choice(optimizer):
            if self.ledger.state in (State.ARMED, State.CEDED):
                self.ledger.cede(f"the script chose {choice}", type(optimizer).__name__, known.site)
            else:
                self.ledger.note(f"{_name(optimizer, known)} left alone: it chose {choice}")
        elif reason := unfusible(optimizer):
            self._keep(optimizer, known, reason)
        else:
            known.fuse = True
            known.matrices = list(_maybe_sparse(optimizer))

    def _start(self, optimizer: Optimizer, known: _Known) -> None:
        """Record the first fused step, and see to it that checkpoints stay the script's own."""
        known.hooked = True
        self._keep_checkpoints_native(optimizer, known)
        if self.ledger.state is State.CEDED:
            self.ledger.settle(State.ARMED)
        self.ledger.apply(type(optimizer).__name__, known.site)

    def _keep(self, optimizer: Optimizer, known: _Known, reason: str) -> None:
        known.fuse = False
        self.ledger.pass_over(_name(optimizer, known), reason)

    def _keep_checkpoints_native(self, optimizer: Optimizer, known: _Known) -> None:
        """Save step counters as the script alone would, and expect them so on loading."""

        def after_save(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            # state_dict() shares the inner dictionaries with the optimizer: changed ones are
            # copies. A step that raised left `fused` on; only a script's own choice is saved.
            if not known.fuse:
                return state_dict
            for group in state_dict["param_groups"]:
                group["fused"] = None
            state = state_dict["state"]
            state_dict["state"] = {key: _native_step(value) for key, value in state.items()}
            return state_dict

        def after_load(_: Optimizer) -> None:
            known.steps_on_device = False
            known.size = -1  # judged anew: what was loaded may have chosen an implementation

        self._hooks.callback(optimizer.register_state_dict_post_hook(after_save).remove)
        self._hooks.callback(optimizer.register_load_state_dict_post_hook(after_load).remove)


def _name(optimizer: Optimizer, known: _Known) -> str:
    return f"{type(optimizer).__name__} ({known.site})"


def own_choice(optimizer: Optimizer) -> str:
    """Give the implementation that the script chose, such as ``foreach=True``; empty if none."""
    for group in optimizer.param_groups:
        for name in OWN_CHOICES:
            value = group.get(name)
            # capturable and differentiable default to False, fused and foreach to None
            if value or (value is False and name in OWN_CHOICES[:2]):
                return f"{name}={value}"
    return ""


def unfusible(optimizer: Optimizer) -> str:
    """Give the reason why an optimizer can't take a fused step; empty if it can."""
    kind = type(optimizer)
    if kind not in FUSIBLE:
        return "torch has no fused kernel for it"
    if "fused" not in inspect.signature(kind.__init__).parameters:
        return f"torch {torch.__version__} has no fused kernel for it"
    if any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
        return "its learning rate is a tensor"
    return next((r for p in _parameters(optimizer) if (r := _unfusible_parameter(kind, p))), "")


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _unfusible_parameter(kind: type[Optimizer], parameter: Tensor) -> str:
    # Source: torch/utils/_foreach_utils.py, torch 2.13
    devices = torch.utils._foreach_utils._get_fused_kernels_supported_devices()
    device = parameter.device.type
    if device not in devices or not _has_kernel(f"aten::_fused_{kind.__name__.lower()}_", device):
        return f"there is no fused kernel for {device}"
    if not parameter.is_floating_point():
        return f"a parameter is {str(parameter.dtype).removeprefix('torch.')}"
    return ""


@functools.cache
def _has_kernel(operator: str, device: str) -> bool:
    """Whether torch has an operator for a device: Adagrad's began on the CPU alone."""
    # A device of an extension has its kernels under the key that torch keeps for one.
    named = device == torch._C._get_privateuse1_backend_name()
    key = "PrivateUse1" if named else device.upper()
    known = torch._C._parse_dispatch_key(key)  # None for a device that has none
    return known is None or torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


def _maybe_sparse(optimizer: Optimizer) -> Iterator[Tensor]:
    """Give the parameters that may get a sparse gradient, as embeddings do, and are allowed one."""
    if isinstance(optimizer, SGD | Adagrad):  # the others refuse sparse gradients by themselves
        yield from (p for p in _parameters(optimizer) if p.dim() == 2)


def _has_sparse_gradients(known: _Known) -> bool:
    for parameter in known.matrices:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            return True
    return False


def _move_step_counters(optimizer: Optimizer) -> None:
    """Put ``state["step"]`` where the fused kernel wants it: in fp32 on the parameter's device."""
    for parameter, state in optimizer.state.items():
        step = state.get("step")
        if isinstance(step, Tensor) and (
            step.device != parameter.device or step.dtype is not torch.float32
        ):
            state["step"] = step.to(parameter.device, torch.float32)


def _native_step(state: Any) -> Any:
    """Give an optimizer's state with its step counter as it is without a fused kernel."""
    step = state.get("step") if isinstance(state, dict) else None
    if not isinstance(step, Tensor):
        return state
    # Source: torch/optim/optimizer.py, torch 2.13, _get_scalar_dtype
    double = torch.get_default_dtype() is torch.float64
    native = step.to("cpu", torch.float64 if double else torch.float32)
    return state if native is step else {**state, "step": native}
