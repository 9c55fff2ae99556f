"""Has torch_npu's fused optimizers make the steps of the script's optimizers.

The script's optimizer stays as it is: object, class, parameter groups, hooks and state. Only the
arithmetic of its ``step`` is done by the fused one, which shares its parameters and its state. So a
checkpoint is at any time what the script alone would have saved. If the two don't match any more,
the script's own step is made, and the fused optimizer is built again or given up.
"""

from __future__ import annotations

import functools
import importlib
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adadelta, Adam, AdamW, Optimizer, RMSprop

from fasttrain.model.decision import Decision
from fasttrain.model.outcome import State
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.loop import closure_of
from fasttrain.shim.hooks.outcome_recorder import Lever, OutcomeRecorder, Shared
from fasttrain.shim.hooks.seams import Training, then
from fasttrain.shim.levers.npu_optimizer.counterparts import (
    Counterpart,
    counterpart_of,
    why_not,
    why_not_now,
)
from fasttrain.shim.levers.npu_optimizer.guard import Twin, uneven, unready
from fasttrain.shim.process.callsite import call_site

# Building a fused optimizer takes about as long as a few steps. It doesn't pay if that is necessary
# more often than every tenth step, as in a loop that swaps its weights all the time.
WORTH_STEPS = 10
# Agreement that counts as equal. Source: torch/testing/_comparison.py, torch 2.13
TOLERANCES = {torch.float32: (1.3e-6, 1e-5), torch.float16: (1e-3, 1e-5)}
# Not the script's own rate: in the trial a step must be large compared to the tolerance.
TRIAL_LR = 0.1
TRIAL_SHAPES = ((7,), (3, 5))


class _Known:
    """The lever's state of one optimizer of the script."""

    __slots__ = ("given_up", "site", "tried", "twin")

    def __init__(self, site: str) -> None:
        self.site = site
        self.given_up = ""
        self.tried = False
        self.twin: Twin | None = None


class NpuOptimizerLever:
    """Makes the steps of optimizers by torch_npu's fused counterparts."""

    def __init__(self, recorder: OutcomeRecorder) -> None:
        self.recorder = recorder
        self._known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
        self._steps: dict[type[Optimizer], Any] = {}  # the own step of each class
        self._undo = ExitStack()

    def install(self, undo: ExitStack) -> None:
        """Replace the step of torch's classes now, of others at their first construction."""
        undo.callback(self._undo.close)
        for kind in (SGD, Adam, AdamW, Adadelta, RMSprop):
            self._take_steps(kind)
        made = then(self._on_made, even_traced=True)
        patching.wrap(Optimizer, "__init__", made, undo, Training.NPU_OPTIMIZER)
        self.recorder.settle(State.ARMED, "no optimizer made a step")

    def refresh(self) -> None:
        """Do nothing: every step is counted when it is made."""

    def takes(self, optimizer: Optimizer) -> bool:
        """True if this lever makes, or may make, an optimizer's steps; no other lever may then."""
        if counterpart_of(type(optimizer)) is None:
            return False
        known = self._known.get(optimizer)
        return known is None or not known.given_up

    def _on_made(self, optimizer: Optimizer) -> None:
        if counterpart_of(type(optimizer)) is not None:
            self._known[optimizer] = _Known(call_site())
            self._take_steps(type(optimizer))

    def _take_steps(self, kind: Any) -> None:
        """Replace a class's step by ours, inside the hooks that torch wraps around it."""
        if kind in self._steps:
            return
        step: Any = kind.step
        native = step.__wrapped__ if getattr(step, "hooked", False) else step
        while hasattr(native, "_fasttrain_native"):  # AdamW inherits Adam's
            native = native._fasttrain_native
        self._steps[kind] = native

        @functools.wraps(native)
        def ours(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or type(optimizer) is not kind:
                return native(optimizer, *args, **kwargs)
            return self._step(optimizer, args, kwargs)

        ours._fasttrain_native = native  # type: ignore[attr-defined]
        hooked: Any = Optimizer.profile_hook_step(ours)
        hooked.hooked = True
        patching.put(kind, "step", hooked, self._undo)

    def _step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        native = self._steps[type(optimizer)]
        known = self._known.get(optimizer)
        if known is None:  # it was unpickled, without its constructor
            known = self._known[optimizer] = _Known(call_site())
        if known.given_up:
            return native(optimizer, *args, **kwargs)
        loss = None
        closure = closure_of((optimizer, *args), kwargs)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        twin = self._fitting(optimizer, known)
        if twin is None:
            native(optimizer)
        else:
            twin.step(optimizer)
            self.recorder.counts["steps"] += 1
        return loss

    def _fitting(self, optimizer: Optimizer, known: _Known) -> Twin | None:
        """Return the fused optimizer for this step; None if the script's own has to make it."""
        if all(parameter.grad is None for parameter in _parameters(optimizer)):
            return None  # nothing to do, as when loss scaling skips a step that overflowed
        twin = known.twin
        if reason := why_not(optimizer) if twin is None else _misfit(optimizer, twin):
            if twin is None or twin.steps < WORTH_STEPS:
                self._give_up(optimizer, known, reason)
            known.twin = None
            return None
        if twin is None:
            twin = known.twin = self._build(optimizer, known)
        return twin

    def _build(self, optimizer: Optimizer, known: _Known) -> Twin | None:
        counterpart = counterpart_of(type(optimizer))
        if counterpart is None:
            return None
        if reason := uneven(optimizer, counterpart):
            self._give_up(optimizer, known, reason)
            return None
        if unready(optimizer, counterpart):
            return None
        try:
            kind = getattr(importlib.import_module("torch_npu.optim"), counterpart.fused)
            if not known.tried:
                self._try(optimizer, counterpart, kind)
                known.tried = True
            twin = Twin(optimizer, counterpart, kind)
        except Exception as error:  # noqa: BLE001 - whatever fails, the script's own step works
            self._give_up(optimizer, known, f"{type(error).__name__}: {error}")
            return None
        self.recorder.apply(f"{type(optimizer).__name__} as {counterpart.fused}", known.site)
        return twin

    def _try(self, optimizer: Optimizer, counterpart: Counterpart, kind: Any) -> None:
        """Make one step of a small copy by both optimizers.

        Raises:
            ValueError: The results differ.
        """
        native = self._steps[type(optimizer)]
        ours, theirs = _small_copy(optimizer), _small_copy(optimizer)
        for copy in (ours, theirs):
            native(copy)
            for parameter in _parameters(copy):
                parameter.grad = _ramp(parameter).mul_(-0.5)
        native(theirs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch_npu's calls that torch deprecates warn once
            Twin(ours, counterpart, kind).step(ours)
        for name, found, expected in _compared(ours, theirs):
            if not _agree(found, expected):
                raise ValueError(f"on a small copy, {name} differed after a step")

    def _give_up(self, optimizer: Optimizer, known: _Known, reason: str) -> None:
        known.given_up = reason
        self.recorder.pass_over(f"{type(optimizer).__name__} ({known.site})", reason)


def _misfit(optimizer: Optimizer, twin: Twin) -> str:
    return twin.misfit(optimizer) or why_not_now(optimizer)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _ramp(like: Tensor) -> Tensor:
    values = torch.linspace(-1, 1, like.numel(), dtype=torch.float32)
    return values.reshape(like.shape).to(like.device, like.dtype)


def _small_copy(optimizer: Optimizer) -> Any:
    """Return an optimizer with the same settings and no steps yet, over a few small tensors."""
    copy = object.__new__(type(optimizer))  # its constructor may take arguments unknown here
    vars(copy).update(vars(optimizer))
    copy.param_groups = []
    copy.state = defaultdict(dict)
    for group in optimizer.param_groups:
        used = {(p.device, p.dtype) for p in group["params"] if p.grad is not None}
        params = []
        for device, dtype in sorted(used, key=str):
            params += [torch.ones(shape, device=device, dtype=dtype) for shape in TRIAL_SHAPES]
        for parameter in params:
            parameter.add_(_ramp(parameter), alpha=0.5)
            parameter.grad = _ramp(parameter)
        copy.param_groups.append({**group, "lr": TRIAL_LR, "params": params})
    return copy


def _compared(ours: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    for found, expected in zip(_parameters(ours), _parameters(theirs), strict=True):
        yield "a parameter", found, expected
        states = ours.state.get(found, {}), theirs.state.get(expected, {})
        for key, value in states[1].items():
            yield key, states[0].get(key), value


def _agree(found: Any, expected: Any) -> bool:
    if not isinstance(expected, Tensor):
        return bool(found == expected)
    relative, absolute = TOLERANCES[expected.dtype]
    return torch.allclose(found.cpu(), expected.cpu(), rtol=relative, atol=absolute)


def build(shared: Shared, _decision: Decision[Any], recorder: OutcomeRecorder) -> list[Lever]:
    """Build the lever."""
    lever = NpuOptimizerLever(recorder)
    shared.stepped_elsewhere.append(lever.takes)
    return [lever]
