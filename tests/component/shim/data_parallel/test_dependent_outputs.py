"""Which outputs of a model are computed from others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fasttrain.shim.data_parallel.split.graph import edge_of, graph_edges, leaves_of

Outputs = tuple[Tensor, Tensor]


def halves(x: Tensor) -> Outputs:
    mean, deviation = x.mul(2).chunk(2, dim=1)
    return mean, deviation.exp()


def state(x: Tensor) -> Outputs:
    output, (hidden, _) = torch.nn.LSTM(4, 3)(x.unsqueeze(0))
    return output, hidden


def hidden_and_result(x: Tensor) -> Outputs:
    hidden = x.tanh()
    return hidden, hidden.sum(1)


@pytest.mark.parametrize(
    ("compute", "depend"), [(halves, False), (state, False), (hidden_and_result, True)]
)
def test_outputs_beside_one_another_depend_on_no_other(
    compute: Callable[[Tensor], Outputs], depend: bool
) -> None:
    outputs = compute(torch.randn(2, 4, requires_grad=True))
    edges, older = graph_edges(outputs, 0)
    assert any(edge_of(output) in edges for output in outputs) == depend
    assert older == ""


def test_leaves_are_those_that_outputs_were_computed_from() -> None:
    used, weight = (torch.ones(2, requires_grad=True) for _ in range(2))
    edges, _ = graph_edges([(used * weight).sum(), weight.exp()], 0)
    assert {id(leaf) for leaf in leaves_of(edges)} == {id(used), id(weight)}
