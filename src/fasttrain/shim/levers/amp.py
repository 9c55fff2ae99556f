"""Mixed precision: autocast around each call of a root, floating outputs back in fp32.

Autocast is never entered for the whole process: its cache of cast weights empties only when the
outermost autocast is left, so that training would go on with the first step's weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.amp import GradScaler, autocast

from fasttrain.shim.callsite import call_site, called_by_user
from fasttrain.shim.casting import to_float32
from fasttrain.shim.ledger import Ledger
from fasttrain.shim.roots import Call, Root, RootCalls
from fasttrain.spec.decision import Decision
from fasttrain.spec.outcome import State
from fasttrain.spec.plan import Amp

# Functions that raise inside autocast; their inputs are cast to fp32 instead.
# Source: torch/autocast_mode.h, torch 2.13, AT_FORALL_... "banned" list: binary_cross_entropy only.
REFUSED_FUNCTIONS = ("binary_cross_entropy",)


class AmpLever:
    """Enters autocast around each root, unless the script manages precision itself."""

    def __init__(self, decision: Decision[Amp], ledger: Ledger, roots: RootCalls) -> None:
        self.ledger = ledger
        self._dtype: torch.dtype = getattr(torch, decision.value.precision)
        self._planned_device = "cuda" if decision.value.device == "rocm" else decision.value.device
        self._explicit = decision.source.explicit
        self._roots = roots
        self._enter: Callable[..., Any] = autocast.__enter__
        self._exit: Callable[..., Any] = autocast.__exit__

    def install(self, undo: ExitStack) -> None:
        """Take the roots' region, watch for the script's own precision, mend what refuses it."""
        self._watch_autocast(undo)
        self._watch_scaler(undo)
        for name in REFUSED_FUNCTIONS:
            _run_in_float32(name, undo)
        self._roots.region = self._region
        undo.callback(setattr, self._roots, "region", None)
        self.ledger.settle(State.ARMED, "no module with fp32 parameters was called")

    def refresh(self) -> None:
        """Nothing is pending: every call is counted as it happens."""

    def _region(
        self, root: Root, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        device = self._device_of(root)
        if device is None:
            return call(*args, **kwargs)
        context = autocast(device, dtype=self._dtype)
        self._enter(context)
        try:
            output = call(*args, **kwargs)
        finally:
            self._exit(context, None, None, None)
        self.ledger.apply(root.name, root.where)
        self.ledger.counts["forwards"] += 1
        return to_float32(output, self._dtype)

    def _device_of(self, root: Root) -> str | None:
        """Give the device type to autocast on, or None where this call is to be left alone."""
        parameter = root.parameter()
        if parameter is None:
            return None
        device = parameter.device.type
        if torch.is_autocast_enabled(device):
            return None  # the script's own, or activation checkpointing that repeats a forward
        if parameter.dtype is not torch.float32:
            self._leave(root, f"its parameters are {str(parameter.dtype).removeprefix('torch.')}")
            return None
        if device != self._planned_device and not self._explicit:
            self._leave(root, f"it is on {device}, and {self._planned_device} was decided for")
            return None
        return device

    def _leave(self, root: Root, why: str) -> None:
        self.ledger.note(f"{root.name} ({root.where}) left alone: {why}")
        if self.ledger.state is State.ARMED:
            self.ledger.reason = f"{root.name}: {why}"

    def _cede(self, what: str) -> None:
        if self.ledger.live:
            self.ledger.cede("the script manages precision itself", what, call_site())
            self._roots.region = None

    def _watch_autocast(self, undo: ExitStack) -> None:
        original = autocast.__enter__

        @functools.wraps(original)
        def __enter__(context: autocast) -> Any:  # noqa: N807
            # torch enters it too, such as a checkpoint that repeats a forward.
            if context._enabled and called_by_user(through=("autocast_mode.py", "contextlib.py")):
                self._cede("autocast")
            return original(context)

        autocast.__enter__ = __enter__  # type: ignore[method-assign]
        undo.callback(setattr, autocast, "__enter__", original)

    def _watch_scaler(self, undo: ExitStack) -> None:
        original = GradScaler.__init__

        @functools.wraps(original)
        def __init__(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(scaler, *args, **kwargs)
            if scaler.is_enabled():
                self._cede(type(scaler).__name__)

        GradScaler.__init__ = __init__  # type: ignore[method-assign]
        undo.callback(setattr, GradScaler, "__init__", original)


def _run_in_float32(name: str, undo: ExitStack) -> None:
    """Make one function of torch.nn.functional leave autocast and take fp32 inputs."""
    original = getattr(F, name)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        device = next((a.device.type for a in args if isinstance(a, Tensor)), "cpu")
        if not torch.is_autocast_enabled(device):
            return original(*args, **kwargs)
        low = torch.get_autocast_dtype(device)
        with torch.amp.autocast(device, enabled=False):
            return original(*to_float32(args, low), **to_float32(kwargs, low))

    setattr(F, name, function)
    undo.callback(setattr, F, name, original)
