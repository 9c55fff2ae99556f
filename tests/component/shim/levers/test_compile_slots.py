"""What runs compiled of the modules whose slots are filled."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fasttrain.model.outcome import State
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.levers.compile.slots import (
    FEW_CALLS,
    FREE_STALLS,
    Filling,
    Slots,
    Stalls,
    separate_function,
)
from support.rig import X, backend, network, rig


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


def clone(module: nn.Module) -> nn.Module:
    """Return a copy with weights of its own, as learn2learn makes it; all are 0."""
    made: nn.Module = module.__new__(type(module))
    made.__dict__ = module.__dict__.copy()
    made._parameters = {name: p * 0 for name, p in module._parameters.items() if p is not None}  # type: ignore[assignment]
    made._modules = {name: clone(part) for name, part in module._modules.items() if part}
    return made


# dynamo warns while it compiles; here that would be an error inside the compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_a_copy_of_a_modules_dictionary_computes_with_its_own_weights(scope: str) -> None:
    model = nn.Sequential(*(network() for _ in range(3)))
    with backend("eager"), rig(compile="default", scope=scope) as runtime:
        model(X)
        assert clone(model)(X).abs().sum() == 0
        assert clone(clone(model))(X).abs().sum() == 0
        outcome = runtime.outcomes()["compile"]
    assert outcome.state is State.APPLIED
    assert outcome.counts["targets"] == 3 * (3 if scope == "blocks" else 1)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("rows", [1, 3])
def test_a_call_under_a_dispatch_mode_does_not_end_compilation(rows: int) -> None:
    model = network()
    with backend("aot_eager"), rig(compile="default"):
        model(X)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(X[:rows])
        assert type(model(X).grad_fn).__name__ == "CompiledFunctionBackward"
    assert counter.get_total_flops() == 2 * rows * 2 * 4 * 8
