"""What a backward pass of several ranks may start from."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from fasttrain.shim.data_parallel.backward import BackwardPasses
from fasttrain.shim.data_parallel.replica import Replica


def passes_of(ranks: Any, batch: str = "split") -> Any:
    """Return passes of ranks that are at the same line."""
    context: Any = SimpleNamespace(
        ranks=ranks,
        training=SimpleNamespace(made=0, numbered=list),
        strategy=SimpleNamespace(batch=batch),
    )
    passes: Any = BackwardPasses(context)
    passes._same_line = SimpleNamespace(check=lambda *_: None)
    return passes


@pytest.mark.parametrize("batch", ["split", "per-rank"])
def test_a_pass_starts_from_an_edge_of_the_graph(batch: str) -> None:
    ranks = SimpleNamespace(
        waits=nullcontext, broadcast=lambda _: None, gather=lambda own: [own], world_size=1
    )
    passes = passes_of(ranks, batch)
    weight = torch.ones(2, requires_grad=True)
    passes.run(torch.autograd.backward, get_gradient_edge(weight.sum()))
    assert weight.grad is not None


def test_hooks_of_the_script_get_means_before_any_backward_pass_was_run() -> None:
    # Of two ranks the other one has zeros.
    ranks: Any = SimpleNamespace(waits=nullcontext, sum=lambda tensor: tensor, world_size=2)
    passes, module, seen = passes_of(ranks), nn.Linear(1, 1, bias=False), []
    replica = Replica(module, ranks)
    passes.add(replica)
    module.weight.register_hook(lambda gradient: seen.append(gradient.item()))
    passes.gradients(torch.autograd.grad, module(torch.ones(1, 1)).sum(), module.weight)
    assert seen == [0.5]
