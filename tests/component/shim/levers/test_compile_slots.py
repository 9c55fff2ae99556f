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
from fasttrain.model.proof import Proof
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.levers.compile.slots import (
    FEW_CALLS,
    FREE_STALLS,
    Filling,
    Slots,
    Stalls,
    separate_function,
)
from fasttrain.shim.runtime import Runtime
from support.rig import X, backend, network, rig

CAN_BE_ASKED = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")


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


def test_hooks_on_saved_tensors_may_be_any_callables() -> None:
    calls: list[str] = []
    module, recorder = nn.Linear(2, 1), OutcomeRecorder("compile", "default", explicit=True)
    with ExitStack() as undo:
        slots = Slots(recorded(calls), "default", recorder)
        slots.fill(module, separate_function("Linear"), Filling(), undo)
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.half, torch.Tensor.float):
            module(torch.ones(1, 2)).sum().backward()
    assert calls == ["compiled"]


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


class Named(nn.Module):
    def forward(self, x: torch.Tensor, **others: int) -> torch.Tensor:
        return x * sum(others.values())


def test_arguments_may_have_any_name() -> None:
    module, recorder = Named(), OutcomeRecorder("compile", "default", explicit=True)

    with ExitStack() as undo:
        slots = Slots(lambda call, **_: call, "default", recorder)
        slots.fill(module, separate_function("Named"), Filling(), undo)
        assert module(torch.ones(()), module=1, args=2, ref=3) == 6
        slots.on_hook(module, None)
        assert module(torch.ones(()), module=1, args=2, ref=3) == 6


class Checkpointed:
    """A module whose calls a checkpoint repeats, and the number of those that ran compiled."""

    def __init__(self, undo: ExitStack, **stalls: int) -> None:
        self.calls: list[str] = []
        recorder = OutcomeRecorder("compile", "default", explicit=True)
        self.slots = Slots(recorded(self.calls), "default", recorder)
        self.module = nn.Linear(2, 1)
        filling = Filling(stalls=Stalls(**stalls))
        self.slots.fill(self.module, separate_function("Linear"), filling, undo)

    def __call__(self, rows: int, on: bool = True) -> torch.Tensor:
        self.slots.on = on
        out: torch.Tensor = checkpoint(self.module, torch.ones(rows, 2), use_reentrant=False)
        return out.sum()

    def compiled(self) -> int:
        """Return how many calls ran compiled since the last time."""
        count = len(self.calls)
        self.calls.clear()
        return count


@pytest.mark.skipif(not CAN_BE_ASKED, reason="needs a torch that can be asked for a checkpoint")
@pytest.mark.parametrize("first", [True, False])
def test_calls_of_one_step_are_each_repeated_as_they_ran(first: bool) -> None:
    """As a batch in chunks, of which the last one is smaller and runs eagerly."""
    with ExitStack() as undo:
        call = Checkpointed(undo)
        for one, other in ((first, not first), (not first, first)):
            loss = call(32, one) + call(32, one) + call(16, other)
            ran = call.compiled()
            assert ran == (2 if one else 1)
            loss.backward()
            assert call.compiled() == ran


@pytest.mark.skipif(not CAN_BE_ASKED, reason="needs a torch that can be asked for a checkpoint")
@pytest.mark.parametrize("first", [True, False])
def test_calls_of_one_form_run_in_one_way_until_they_are_repeated(first: bool) -> None:
    """In the backward pass nothing else tells them apart."""
    with ExitStack() as undo:
        call = Checkpointed(undo)
        loss = call(32, first) + call(32, not first)
        assert call.compiled() == (2 if first else 0)
        loss.backward()
        assert call.compiled() == (2 if first else 0)
        call(32, not first)
        assert call.compiled() == (0 if first else 1)


@pytest.mark.skipif(not CAN_BE_ASKED, reason="needs a torch that can be asked for a checkpoint")
def test_a_call_that_rests_is_repeated_so_after_one_that_may_compile() -> None:
    with ExitStack() as undo:
        call = Checkpointed(undo, calls=FEW_CALLS - 1, stalled=FREE_STALLS)
        loss = call(32) + call(16)
        assert call.compiled() == 1, "the last one"
        loss.backward()
        assert call.compiled() == 1
        call(32)
        assert call.compiled() == 1


@pytest.mark.parametrize("proof", [None, Proof("chosen", -1)])
def test_random_numbers_are_those_of_a_plain_run_where_losses_are_compared(
    monkeypatch: pytest.MonkeyPatch, proof: Proof | None
) -> None:
    monkeypatch.setattr(Runtime, "_prove", lambda *_: None)
    with backend("eager"), rig(compile="default", proof=proof), torch.device("meta"):
        nn.Linear(2, 2)(torch.ones(1, 2))  # on no CPU
        assert torch._inductor.config.fallback_random is (proof is not None)
