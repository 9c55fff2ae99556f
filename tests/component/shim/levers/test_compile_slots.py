"""What runs compiled of the modules whose slots are filled."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.levers.compile.slots import (
    FEW_CALLS,
    FREE_STALLS,
    Filling,
    Slots,
    Stalls,
    separate_function,
)


def recorded(calls: list[str]) -> Any:
    """Return what stands in for torch.compile, and records the calls that run compiled."""

    def recording(call: Any, **_: Any) -> Any:
        def compiled(*args: Any) -> Any:
            calls.append("compiled")
            return call(*args)

        return compiled

    return recording


@pytest.mark.parametrize("on", [True, False])
def test_a_checkpoint_repeats_its_forward_pass_whatever_was_switched_since(on: bool) -> None:
    calls: list[str] = []
    module, recorder = nn.Linear(2, 1), OutcomeRecorder("compile", "default", explicit=True)
    with ExitStack() as undo:
        slots = Slots(recorded(calls), "default", recorder)
        slots.fill(module, separate_function("Linear"), Filling(), undo)
        slots.on = on
        loss = checkpoint(module, torch.ones(1, 2), use_reentrant=False).sum()
        slots.on = not on
        loss.backward()
        assert len(calls) == (2 if on else 0)
        module(torch.ones(1, 2))
        assert len(calls) == (2 if on else 1)


def test_a_checkpoint_compiles_nothing_that_its_forward_pass_has_put_off() -> None:
    calls: list[str] = []
    module, recorder = nn.Linear(2, 1), OutcomeRecorder("compile", "default", explicit=True)
    filling = Filling(stalls=Stalls(calls=FEW_CALLS - 1, stalled=FREE_STALLS))
    with ExitStack() as undo:
        slots = Slots(recorded(calls), "default", recorder)
        slots.fill(module, separate_function("Linear"), filling, undo)
        checkpoint(module, torch.ones(1, 2), use_reentrant=False).sum().backward()
        assert calls == []
        module(torch.ones(1, 2))
        assert calls == ["compiled"]
