"""What a backward pass of several ranks may start from."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from fasttrain.shim.data_parallel.backward import BackwardPasses
from fasttrain.shim.data_parallel.replica import Replica
from fasttrain.shim.hooks.loop import TrainingState
from fasttrain.shim.hooks.roots import RootCalls

# One of two ranks, of which the other one has zeros.
RANKS: Any = SimpleNamespace(
    waits=nullcontext, sum=lambda tensor: tensor, broadcast=lambda _: None,
    gather=lambda own: [own], world_size=2, means=None,
)  # fmt: skip


def passes_of(ranks: Any, batch: str = "split", training: TrainingState | None = None) -> Any:
    """Return passes of ranks that are at the same line."""
    context: Any = SimpleNamespace(
        ranks=ranks,
        training=training or TrainingState(RootCalls()),
        strategy=SimpleNamespace(batch=batch),
    )
    passes: Any = BackwardPasses(context)
    passes._same_line = SimpleNamespace(check=lambda *_: None)
    return passes


@pytest.mark.parametrize("batch", ["split", "per-rank"])
def test_a_pass_starts_from_an_edge_of_the_graph(batch: str) -> None:
    ranks = SimpleNamespace(
        means=None,
        waits=nullcontext,
        broadcast=lambda _: None,
        gather=lambda own: [own],
        world_size=1,
    )
    passes = passes_of(ranks, batch)
    weight = torch.ones(2, requires_grad=True)
    passes.run(torch.autograd.backward, get_gradient_edge(weight.sum()))
    assert weight.grad is not None


def test_hooks_of_the_script_get_means_before_any_backward_pass_was_run() -> None:
    passes, module = passes_of(RANKS), nn.Linear(1, 1, bias=False)
    seen: list[float] = []
    replica = Replica(module, RANKS)
    passes.add(replica)
    module.weight.register_hook(lambda gradient: seen.append(gradient.item()))
    passes.gradients(torch.autograd.grad, module(torch.ones(1, 1)).sum(), module.weight)
    assert seen == [0.5]


def test_a_gradient_of_a_parameter_that_no_root_owns_is_averaged_before_any_backward_pass() -> None:
    with ExitStack() as undo:
        training = TrainingState(RootCalls())
        training.install(undo)
        passes, bare = passes_of(RANKS, training=training), torch.ones(1, requires_grad=True)
        optimizer = torch.optim.SGD([bare])
        assert passes.unowned() == {id(bare)}
        (gradient,) = passes.gradients(torch.autograd.grad, bare.sum(), bare)
    assert gradient.item() == 0.5
    del optimizer
