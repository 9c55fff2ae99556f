"""A graph that was compiled in a split call is not used by a whole one of the same shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.testing import CompileCounterWithBackend

from fasttrain.shim.data_parallel.split.call import SplitCalls
from fasttrain.shim.data_parallel.split.rows import reduced_by
from fasttrain.shim.data_parallel.split.whole_batch import install_losses
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.levers.compile.slots import Filling, Slots, separate_function


class LossInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.linear(x), y, reduction="sum")


@pytest.fixture
def splits() -> Iterator[SplitCalls]:
    """Return split calls of which only the switch matters, on two ranks that have equal rows."""
    made = SplitCalls.__new__(SplitCalls)
    made.active = False
    with ExitStack() as undo:
        undo.enter_context(reduced_by(lambda part, _: 2 * part))
        install_losses(made, undo)
        # As in a worker, where dynamo is imported later: it takes what stands there for torch's.
        trace_rules.get_torch_obj_rule_map.cache_clear()
        yield made
        made.active = False
    torch._dynamo.reset()
    trace_rules.get_torch_obj_rule_map.cache_clear()


@pytest.mark.parametrize("finish", [None, lambda output: output], ids=["block", "root"])
@pytest.mark.parametrize("first", [True, False], ids=["split first", "whole first"])
def test_split_and_whole_calls_have_graphs_of_their_own(
    splits: SplitCalls, first: bool, finish: Any
) -> None:
    # AOTAutograd traces the function that stands in for mse_loss, of which dynamo sees the name.
    counter = CompileCounterWithBackend("aot_eager")
    module = LossInside()
    recorder = OutcomeRecorder("compile", "default", explicit=True)
    with ExitStack() as undo:
        slots = Slots(lambda call, mode: torch.compile(call, backend=counter), "default", recorder)
        slots.fill(module, separate_function("LossInside", finish), Filling(finish), undo)
        x, y = torch.ones(4, 3), torch.ones(4, 1)
        found = {}
        for active in (first, not first, first):
            splits.active = active
            found[active] = module(x, y).item()
        assert found[True] == pytest.approx(2 * found[False])
        assert counter.frame_count == 2, "each is compiled once"
