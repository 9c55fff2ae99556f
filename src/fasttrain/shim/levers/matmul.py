"""Sets the precision of fp32 matrix products once, until the script sets its own.

Where the machine decided, lower precision is for runs that accept it already: it is set while amp
runs any root in low precision, and taken back when amp has left all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from fasttrain.model.decision import Decision, SourceKind
from fasttrain.model.outcome import State
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.outcome_recorder import Lever, OutcomeRecorder, Shared
from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.process.callsite import call_site

# Attributes by which a script chooses the precision itself; the other way is torch's function.
OWN_CHOICES = ("allow_tf32", "fp32_precision")
# What that function sets as well, from torch 2.9 on; "none" there follows torch.backends.
# Source: aten/src/ATen/Context.cpp of torch 2.13, setFloat32MatmulPrecision.
PARTS = (("cuda", "matmul"), ("mkldnn", "matmul"))
NOT_LOWERED = "amp runs no model in low precision, so full fp32 precision is kept"


class MatmulLever:
    """Calls torch.set_float32_matmul_precision; the script's own later choice wins."""

    def __init__(
        self, decision: Decision[Any], recorder: OutcomeRecorder, roots: RootCalls
    ) -> None:
        self.recorder = recorder
        self._roots = roots
        self._on = True
        self._accepted = decision.source.kind is not SourceKind.MACHINE
        self._decision = decision
        self._before = ""
        self._parts_before: dict[tuple[str, str], str] = {}
        self._set: Callable[[str], None] = torch.set_float32_matmul_precision

    def install(self, undo: ExitStack) -> None:
        """Set the precision and watch for the script's own choice."""
        self._before = torch.get_float32_matmul_precision()
        if hasattr(torch._C, "_get_fp32_precision_getter"):
            self._parts_before = {p: torch._C._get_fp32_precision_getter(*p) for p in PARTS}
        name = "set_float32_matmul_precision"
        patching.wrap(torch, name, self._watched_function, undo)
        self._watch_attributes("torch.backends.cuda.matmul", torch.backends.cuda.matmul, undo)
        if hasattr(torch.backends, "fp32_precision"):
            self._watch_attributes("torch.backends", torch.backends, undo)
        if self._decision.value == "keep":
            return
        undo.callback(self._put_back)
        self.recorder.settle(State.ARMED)
        self.recorder.excuse(State.SKIPPED, NOT_LOWERED)
        if self._accepted:
            self._set_planned()
        else:
            self._roots.on_lowering.append(self._follow)
            undo.callback(self._roots.on_lowering.remove, self._follow)

    def _set_planned(self) -> None:
        if self._on:
            self._set(self._decision.value)
        self.recorder.apply("fp32 matrix products", self._decision.value)

    def _follow(self, lowering: bool) -> None:
        self._accepted = lowering
        if self.recorder.state is State.CEDED:
            return
        if lowering:
            self.recorder.settle(State.ARMED)
            self._set_planned()
        else:
            self._put_back()
            self.recorder.settle(State.SKIPPED, NOT_LOWERED)

    def switch(self, *, on: bool) -> None:
        """Compute the next matrix products in this precision, or in the script's."""
        self._on = on
        if self.recorder.live and self._decision.value != "keep":
            if on and self._accepted:
                self._set(self._decision.value)
            else:
                self._put_back()

    def refresh(self) -> None:
        """Do nothing: the recorder is up to date at any time."""

    def _put_back(self) -> None:
        self._set(self._before)
        for part, precision in self._parts_before.items():
            torch._C._set_fp32_precision_setter(*part, precision)

    def _cede(self, what: str) -> None:
        if self.recorder.live:
            # torch's own setting first: one attribute of the script's changes only a part of it.
            self._put_back()
        if self.recorder.state is not State.CEDED:
            self.recorder.cede("the script chooses the precision itself", what, call_site())

    def _watched_function(self, original: Any) -> Any:
        @functools.wraps(original)
        def set_float32_matmul_precision(precision: str) -> None:
            self._cede(f"set_float32_matmul_precision({precision!r})")
            original(precision)

        return set_float32_matmul_precision

    def _watch_attributes(self, name: str, holder: Any, undo: ExitStack) -> None:
        kind: Any = type(holder)
        original = kind.__setattr__

        def __setattr__(target: Any, attribute: str, value: Any) -> None:  # noqa: N807
            if attribute in OWN_CHOICES:
                self._cede(f"{name}.{attribute} = {value!r}")
            original(target, attribute, value)

        patching.put(kind, "__setattr__", __setattr__, undo)


def build(shared: Shared, decision: Decision[Any], recorder: OutcomeRecorder) -> list[Lever]:
    """Build the lever."""
    return [MatmulLever(decision, recorder, shared.roots)]
