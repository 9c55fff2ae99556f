"""A compiled model is cut at DDP's buckets, so that sending overlaps the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasttrain.shim.data_parallel.replica import Replica
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.levers.compile.account import CUT, Account
from support.fake_ranks import on_ranks

BUCKET = 1 << 20  # bytes of DDP's first bucket; the last layer's weights fill it
WIDTH = 600


def compiled_parts(node: Any) -> int:
    """Count the compiled graphs in the backward pass from a node on."""
    waiting, met = [node], {node}
    while waiting:
        for after, _ in waiting.pop().next_functions:
            if after is not None and after not in met:
                met.add(after)
                waiting.append(after)
    return sum("CompiledFunction" in type(one).__name__ for one in met)


@pytest.fixture
def model() -> Iterator[nn.Module]:
    """Return a model with two buckets of weights."""
    torch.manual_seed(0)
    yield nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    torch._dynamo.reset()


def called_in_a_replica(model: nn.Module, call: Any, inputs: Tensor) -> Tensor:
    """Call a model as the root of a run of ranks, before DDP averages its gradients."""
    (ranks,) = on_ranks(1, lambda ranks: ranks)
    output: Tensor = Replica(model, ranks).call(call, (inputs,), {})
    return output


def test_what_is_compiled_before_ddp_takes_over_is_cut_at_its_buckets(model: nn.Module) -> None:
    assert WIDTH * WIDTH * 4 > BUCKET
    inputs = torch.randn(4, WIDTH)
    output = called_in_a_replica(model, torch.compile(model, backend="aot_eager"), inputs)
    assert compiled_parts(output.grad_fn) == 2
    torch.testing.assert_close(output, model(inputs))


def test_a_cut_is_told_and_is_no_graph_break(model: nn.Module) -> None:
    recorder = OutcomeRecorder("compile", "default", explicit=False)
    with ExitStack() as undo:
        account = Account(undo)
        inputs = torch.randn(4, WIDTH)
        called_in_a_replica(model, torch.compile(model, backend="aot_eager"), inputs)
        account.read(recorder)
    assert recorder.outcome().notes == (CUT,)
    assert recorder.counts["breaks"] == 0


def test_nothing_else_that_is_compiled_is_cut(model: nn.Module) -> None:
    inputs = torch.randn(4, WIDTH)
    called_in_a_replica(model, model, inputs)
    assert compiled_parts(torch.compile(model, backend="aot_eager")(inputs).grad_fn) == 1
