"""The autograd graph of a call's outputs: which of them were computed from others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from fasttrain.shim.data_parallel.split.rows import CROSSINGS

_LEAF = "torch::autograd::AccumulateGrad"


def graph_edges(outputs: Sequence[Tensor], begun: int) -> tuple[set[tuple[Any, int]], str]:
    """Return what tensors depend on, and the name of the first node older than the call.

    Returns:
        The autograd nodes, each with the number of one of its outputs: other outputs of the same
        node, such as the state beside a recurrent layer's output, don't count. And the name.
    """
    pending = list({t.grad_fn for t in outputs if t.grad_fn is not None})
    nodes: set[Any] = set()
    edges: set[tuple[Any, int]] = set()
    while pending:
        node = pending.pop()
        for child, number in node.next_functions:
            if child is None or child.name() in CROSSINGS:
                continue
            edges.add((child, number))
            if child in nodes:
                continue
            nodes.add(child)
            if child.name() == _LEAF:
                continue
            if child._sequence_nr() < begun:
                return edges, str(child.name())
            pending.append(child)
    return edges, ""


def leaves_of(edges: Iterable[tuple[Any, int]]) -> list[Tensor]:
    """Return the leaves that a result of `graph_edges` leads to."""
    return [node.variable for node, _ in edges if node.name() == _LEAF]


def edge_of(tensor: Tensor) -> tuple[Any, int]:
    """Return the autograd node of a tensor and which of its outputs it is."""
    return tensor.grad_fn, tensor.output_nr
