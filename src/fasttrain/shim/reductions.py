"""How a loss was reduced over its batch, read from its autograd graph.

Whether the losses of the ranks' shares have to be averaged or added up, and with which weights,
follows from how the script reduces them: ``reduction="mean"``, ``"sum"``, or by hand.

Source: ``tools/autograd/derivatives.yaml`` of torch 2.13, for the names of what nodes save.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fasttrain.shim.graph_nodes import (
    divisor,
    factors,
    follows_from_parameters,
    is_number,
    numel,
    of_one_number,
    operator_of,
    reduced,
)

Kind = Literal["mean", "sum", "same"]
TOLD = "fasttrain"  # in the metadata of a loss's node, once the loss is that of all ranks

_MEAN, _SUM = 1, 2  # at::Reduction
_MAX_NODES = 64  # of the scalar part of a loss
_CLOSE = 1e-6  # for a number that went through a reciprocal in fp32

_ATEN: Any = torch.ops.aten
# Nodes of losses, with the operator that gives their value and what it takes.
_LOSSES = {
    "MseLoss": (_ATEN.mse_loss, ("self", "target", "reduction")),
    "SmoothL1Loss": (_ATEN.smooth_l1_loss, ("self", "target", "reduction", "beta")),
    "HuberLoss": (_ATEN.huber_loss, ("self", "target", "reduction", "delta")),
    "NllLoss": (
        _ATEN.nll_loss_forward, ("self", "target", "weight", "reduction", "ignore_index"),
    ),
    "NllLoss2D": (
        _ATEN.nll_loss2d_forward, ("self", "target", "weight", "reduction", "ignore_index"),
    ),
    "BinaryCrossEntropy": (_ATEN.binary_cross_entropy, ("self", "target", "weight", "reduction")),
    "BinaryCrossEntropyWithLogits": (
        _ATEN.binary_cross_entropy_with_logits,
        ("self", "target", "weight", "pos_weight", "reduction"),
    ),
}  # fmt: skip


class Term(NamedTuple):
    """One reduction over the samples of a batch.

    Attributes:
        node: Where it is in the graph; None where it can't be seen.
        kind: Whether it is a mean over the samples or a sum, or the same on every rank, as is what
            follows from the parameters alone.
        weight: What a mean was divided by, such as the number of elements or of the tokens that
            count; None where that can't be seen.
        scale: What it is multiplied by on its way to the loss.
    """

    node: Any
    kind: Kind
    weight: Tensor | float | None = None
    scale: float | Tensor = 1.0

    def value(self) -> Tensor | None:
        """Give what it contributes to the loss, found anew; None where that can't be found."""
        name = type(self.node).__name__.removesuffix("Backward0")
        if name not in _LOSSES:
            return None
        operator, fields = _LOSSES[name]
        try:
            saved = [_signed(getattr(self.node, f"_saved_{field}")) for field in fields]
        except RuntimeError:  # the graph was freed
            return None
        found = operator(*saved)
        value: Tensor = (found[0] if isinstance(found, tuple) else found).detach()
        return value * self.scale


def terms_of(
    loss: Tensor, share: int, total: int, known: Mapping[Any, Term] | None = None
) -> list[Term]:
    """Give the reductions that make up a scalar; none where none can be seen.

    Args:
        loss: The scalar.
        share: Samples of this rank, by which a sum may have been divided.
        total: Samples of the whole batch, by which it may have been divided as well.
        known: Terms that were found before their graph was freed, by their nodes.
    """
    try:
        found = _Walk(share, total, known or {}).below(loss.grad_fn, 1.0)
    except RuntimeError:  # the graph was freed
        found = []
    return found


def torchs_mean(node: Any) -> Tensor | float | None:
    """Give what a loss of torch's own is a mean over, by its last node alone; None for others."""
    if getattr(node, "_saved_reduction", None) != _MEAN or node.metadata.get(TOLD):
        return None
    return None if follows_from_parameters(node) else divisor(node)


class _Walk:
    """Follows the scalar part of a graph down to where it was reduced."""

    def __init__(self, share: int, total: int, known: Mapping[Any, Term]) -> None:
        self._share, self._total = share, total
        self._known = known
        self._left = _MAX_NODES

    def below(self, node: Any, scale: float | Tensor) -> list[Term]:
        """Give the terms at or below a node, whose value is multiplied by ``scale``."""
        self._left -= 1
        if node is None or self._left < 0:
            return []
        if node in self._known:
            return [self._known[node]._replace(scale=scale)]
        name = operator_of(node)
        if node.metadata.get(TOLD) or follows_from_parameters(node):
            return [Term(node, "same", None, scale)]
        reduction = getattr(node, "_saved_reduction", None)
        if reduction == _MEAN:
            return [Term(node, "mean", divisor(node), scale)]
        if reduction == _SUM:
            return [Term(node, "sum", None, scale)]
        if name in ("Mean", "Sum", "Dot") and self._reduces(node):
            return self._reduction(node, name, scale)
        return self._through(node, name, scale) if numel(node) == 1 else []  # inside the network

    def _through(self, node: Any, name: str, scale: float | Tensor) -> list[Term]:
        """Give the terms below an operation on single numbers."""
        if name.endswith("Sink"):
            return self.below(node.next_functions[0][0], scale)
        children = [child for child, _ in node.next_functions]
        scales = [scale * factor for factor in factors(node, name, len(children))]
        pairs = zip(children, scales, strict=True)
        terms = [term for child, part in pairs for term in self.below(child, part)]
        by = getattr(node, "_saved_other", None)
        if name == "Mul" and by is not None and is_number(by):
            # Only by the samples: a weight such as 0.05 may well be one over some elements.
            own = abs(float(by) * self._share - 1.0) < _CLOSE and self._share > 1
            return [self._divided(term, float(self._share)) for term in terms] if own else terms
        if not terms and name in ("Mean", "Sum") and not of_one_number(node):
            return self._reduction(node, name, scale)  # all but one of its elements were masked
        return [self._divided(term, by) for term in terms] if name == "Div" else terms

    def _reduces(self, node: Any) -> bool:
        """Whether a node reduces several elements, or the one of the rank's only sample."""
        only_sample = self._share == 1 and self._total > 1 and not of_one_number(node)
        return only_sample or reduced(node) != 1

    def _reduction(self, node: Any, name: str, scale: float | Tensor) -> list[Term]:
        size = reduced(node)
        top = node.next_functions[0][0]
        parts = self._of_stack(top)
        if parts and len(parts) != self._share:
            by = scale / size if name == "Mean" else scale
            return [term for part in parts for term in self.below(part, by)]
        # What was reduced over the batch before: its kind is that of the first reduction.
        batch = _first_over_batch(top, self._share) if name != "Dot" else None
        if batch is not None:
            name = batch
            size = self._share
        if name == "Mean":
            return [Term(node, "mean", float(size), scale)]
        return [Term(node, "sum", None, scale)]

    @staticmethod
    def _of_stack(node: Any) -> list[Any]:
        """Give the numbers that a tensor was put together from."""
        while node is not None and operator_of(node) == "Mul" and numel(node) > 1:
            node = node.next_functions[0][0]
        if node is None or operator_of(node) not in ("Stack", "Cat"):
            return []
        parts = [child for child, _ in node.next_functions if child is not None]
        return parts if all(numel(part) == 1 for part in parts) else []

    def _divided(self, term: Term, by: Any) -> Term:
        """Tell a sum that the script divides by what it counted, which makes it a mean."""
        if term.kind != "sum" or by is None or (isinstance(by, Tensor) and by.numel() != 1):
            return term
        if not is_number(by):
            return term._replace(kind="mean", weight=by.detach().float())  # what it counted
        counts = {float(self._share), float(reduced(term.node))} - {0.0}
        if any(abs(float(by) - count) < _CLOSE * count for count in counts):
            return term._replace(kind="mean", weight=float(by))
        return term  # by a number that does not shrink with the share, such as a batch size


def _first_over_batch(node: Any, share: int) -> str | None:
    """Give the operator that reduced the batch dimension in front of a last reduction."""
    while node is not None:
        name = operator_of(node)
        if name in ("Mean", "Sum"):
            sizes = getattr(node, "_saved_self_sym_sizes", ())
            dims = getattr(node, "_saved_dim", None) or ()
            dims = [d - 2**64 if d >= 2**63 else d for d in dims]
            dims = [d + len(sizes) if d < 0 else d for d in dims]
            if sizes and sizes[0] == share and 0 in dims:
                return name
            return None
        if name not in ("Mul", "Div", "Add", "Sub", "Neg", "Pow"):
            return None
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def _signed(value: Any) -> Any:
    """Give what a node saved; torch shows a negative ``ignore_index`` as an unsigned number."""
    return value - 2**64 if type(value) is int and value >= 2**63 else value
