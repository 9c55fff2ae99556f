"""Mixed precision: autocast around each call of a root, floating outputs back in fp32.

Autocast is never entered for the whole process: its cache of cast weights empties only when the
outermost autocast is left, so that training would go on with the first step's weights.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch.amp import GradScaler, autocast

from fasttrain.shim.callsite import call_site, called_by_user, location, own_prefixes
from fasttrain.shim.casting import to_float32
from fasttrain.shim.ledger import Ledger
from fasttrain.shim.levers.amp_bce import BinaryCrossEntropy
from fasttrain.shim.roots import Call, Root, RootCalls
from fasttrain.spec.decision import Decision
from fasttrain.spec.outcome import State
from fasttrain.spec.plan import Amp


class AmpLever:
    """Enters autocast around each root, unless the script manages precision itself."""

    def __init__(self, decision: Decision[Amp], ledger: Ledger, roots: RootCalls) -> None:
        self.ledger = ledger
        self._dtype: torch.dtype = getattr(torch, decision.value.precision)
        self._planned_device = "cuda" if decision.value.device == "rocm" else decision.value.device
        self._explicit = decision.source.explicit
        self._roots = roots
        self._bce = BinaryCrossEntropy(self._dtype)
        self._enter: Callable[..., Any] = autocast.__enter__
        self._exit: Callable[..., Any] = autocast.__exit__

    def install(self, undo: ExitStack) -> None:
        """Take the roots' region, watch for the script's own precision, mend what refuses it."""
        self._watch_autocast(undo)
        self._watch_scaler(undo)
        self._bce.install(undo)
        self._roots.region, self._roots.low_dtype = self._region, self._dtype
        undo.callback(self._roots.leave_plain)
        self.ledger.settle(State.ARMED, "no module with fp32 parameters was called")

    def refresh(self) -> None:
        """Nothing is pending: every call is counted as it happens."""

    def _region(self, root: Root, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = self._device_of(root)
        if device is None:
            return call(*args, **kwargs)
        context = autocast(device, dtype=self._dtype)
        self._enter(context)
        try:
            output = call(*args, **kwargs)
        finally:
            self._exit(context, None, None, None)
        if self.ledger.live:
            self._roots.lowered = True
            self.ledger.apply(root.name, root.where)
            self.ledger.counts["forwards"] += 1
        else:
            self.ledger.note(f"the call of {root.name} that showed it had begun in {self._dtype}")
        output = to_float32(output, self._dtype, self._bce.to_float32)
        self._bce.forget()
        return output

    def _device_of(self, root: Root) -> str | None:
        """Give the device type to autocast on, or None where this call is to be left alone."""
        parameter = root.parameter()
        if parameter is None:
            return None
        if parameter.dtype is not torch.float32:
            self._leave(root, f"its parameters are {str(parameter.dtype).removeprefix('torch.')}")
            return None
        device = parameter.device.type
        if device != self._planned_device and not self._follows_to(device):
            self._leave(root, f"it is on {device}, and {self._planned_device} was decided for")
            return None
        # The script's own, or activation checkpointing that repeats a forward.
        return None if torch.is_autocast_enabled(device) else device

    def _follows_to(self, device: str) -> bool:
        """Whether precision that was asked for goes to a device that it wasn't decided for."""
        return self._explicit and torch.amp.is_autocast_available(device)

    def _leave(self, root: Root, why: str) -> None:
        self.ledger.pass_over(f"{root.name} ({root.where})", why)

    def _cede(self, what: str, where: str = "") -> None:
        self.ledger.cede("the script manages precision itself", what, where or call_site())
        self._roots.leave_plain()

    def _watch_autocast(self, undo: ExitStack) -> None:
        original: Any = autocast.__enter__

        @functools.wraps(original)
        def __enter__(context: autocast) -> Any:  # noqa: N807
            # torch enters it too, such as a checkpoint that repeats a forward.
            passing = ("autocast_mode.py", "contextlib.py")
            if self.ledger.live and context._enabled:
                if called_by_user(through=passing):
                    self._cede("autocast")
                elif where := _traced_at():
                    self._cede("autocast", where)
            return original(context)

        _replace(autocast, "__enter__", __enter__, undo)

    def _watch_scaler(self, undo: ExitStack) -> None:
        original = GradScaler.__init__

        @functools.wraps(original)
        def __init__(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(scaler, *args, **kwargs)
            if scaler.is_enabled() and self.ledger.live:
                self._cede(type(scaler).__name__)

        _replace(GradScaler, "__init__", __init__, undo)


def _replace(owner: Any, name: str, value: Any, undo: ExitStack) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _traced_at() -> str:
    """Give where in the script dynamo meets autocast while it traces; empty if it does not.

    Dynamo enters autocast when it traces it, and never again when the graph runs.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith("amp/autocast_mode.py"):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.endswith("_dynamo/variables/ctx_manager.py"):
        return ""
    stack = torch._guards.TracingContext.extract_stack()
    own = [f for f in stack if not f.filename.startswith(own_prefixes())]
    return location(own[-1].filename, own[-1].lineno or 0) if own else ""
