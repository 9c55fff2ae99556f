"""Precision of fp32 matrix products: sets it once, and steps back when the script sets its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from fasttrain.shim.callsite import call_site
from fasttrain.shim.ledger import Ledger
from fasttrain.spec.decision import Decision
from fasttrain.spec.outcome import State

# The script's ways to choose: attributes of torch.backends.cuda.matmul, and the function.
OWN_CHOICES = ("allow_tf32", "fp32_precision")


class MatmulLever:
    """Calls torch.set_float32_matmul_precision; the script's own later choice wins."""

    def __init__(self, decision: Decision[Any], ledger: Ledger) -> None:
        self.ledger = ledger
        self._decision = decision
        self._before = ""
        self._set: Callable[[str], None] = torch.set_float32_matmul_precision

    def install(self, undo: ExitStack) -> None:
        """Set the precision and watch for the script's own choice."""
        self._before = torch.get_float32_matmul_precision()
        self._watch_function(undo)
        self._watch_attribute(undo)
        if self._decision.value == "keep":
            return
        self._set(self._decision.value)
        undo.callback(self._set, self._before)
        self.ledger.settle(State.ARMED)
        self.ledger.apply("fp32 matrix products", self._decision.value)

    def refresh(self) -> None:
        """Nothing is pending."""

    def _cede(self, what: str) -> None:
        if self.ledger.live:
            # Back to torch's own first: the script's choice starts from where it expects to.
            self._set(self._before)
        if self.ledger.state is not State.CEDED:
            self.ledger.cede("the script chooses the precision itself", what, call_site())

    def _watch_function(self, undo: ExitStack) -> None:
        original = torch.set_float32_matmul_precision

        @functools.wraps(original)
        def set_float32_matmul_precision(precision: str) -> None:
            self._cede(f"set_float32_matmul_precision({precision!r})")
            original(precision)

        torch.set_float32_matmul_precision = set_float32_matmul_precision
        undo.callback(setattr, torch, "set_float32_matmul_precision", original)

    def _watch_attribute(self, undo: ExitStack) -> None:
        backend = type(torch.backends.cuda.matmul)
        original = backend.__setattr__

        def __setattr__(target: Any, name: str, value: Any) -> None:  # noqa: N807
            if name in OWN_CHOICES:
                self._cede(f"torch.backends.cuda.matmul.{name} = {value!r}")
            original(target, name, value)

        backend.__setattr__ = __setattr__  # type: ignore[method-assign,assignment]
        undo.callback(setattr, backend, "__setattr__", original)
