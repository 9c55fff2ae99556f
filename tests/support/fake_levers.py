"""Stands in for levers that are switched while a script trains."""

from __future__ import annotations

from fasttrain.model.outcome import State
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder


class FakeLever:
    """A lever of which only the switch matters."""

    def __init__(self, name: str, state: State, reason: str) -> None:
        self.recorder = OutcomeRecorder(name, "default", explicit=False)
        self.recorder.settle(state, reason)
        self.on = True

    def switch(self, *, on: bool) -> None:
        self.on = on

    def refresh(self) -> None:
        """Nothing is pending."""
