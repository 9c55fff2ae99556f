"""What a backward pass of several ranks may start from."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from fasttrain.shim.data_parallel.backward import BackwardPasses


@pytest.mark.parametrize("batch", ["split", "per-rank"])
def test_a_pass_starts_from_an_edge_of_the_graph(batch: str) -> None:
    context: Any = SimpleNamespace(
        ranks=SimpleNamespace(
            waits=nullcontext, broadcast=lambda _: None, gather=lambda own: [own], world_size=1
        ),
        training=SimpleNamespace(made=0, numbered=list),
        strategy=SimpleNamespace(batch=batch),
    )
    passes: Any = BackwardPasses(context)
    passes._same_line = SimpleNamespace(check=lambda *_: None)
    weight = torch.ones(2, requires_grad=True)
    passes.run(torch.autograd.backward, get_gradient_edge(weight.sum()))
    assert weight.grad is not None
