"""How a loss was reduced over its batch, read from its autograd graph.

Whether the losses of the ranks' shares have to be averaged or added up, and with which weights,
follows from how the script reduces them: ``reduction="mean"``, ``"sum"``, or by hand.

Source: ``tools/autograd/derivatives.yaml`` of torch 2.13, for the names of what nodes save.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["mean", "sum"]

_MEAN, _SUM = 1, 2  # at::Reduction
_MAX_NODES = 64  # of the scalar part of a loss, and of one that may hold parameters alone
_SUMS = ("SumBackward", "DotBackward")
# What a penalty on the parameters is made of, which has nothing to do with the batch.
_ELEMENTWISE = (
    "Pow", "Mul", "Abs", "Add", "Sub", "Div", "Neg", "Sum", "Mean", "Norm", "LinalgVectorNorm",
    "View", "Reshape", "Select", "Slice", "T", "Sqrt", "ToCopy",
)  # fmt: skip

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


@dataclass(frozen=True, slots=True)
class Term:
    """One reduction over the samples of a batch.

    Attributes:
        node: Where it is in the graph; None where it can't be seen.
        kind: Whether it is a mean over the samples or a sum.
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
        found = operator(*(_signed(getattr(self.node, f"_saved_{field}")) for field in fields))
        value: Tensor = (found[0] if isinstance(found, tuple) else found).detach()
        return value * self.scale


def terms_of(
    loss: Tensor, share: int, total: int, known: Mapping[Any, Term] | None = None
) -> list[Term]:
    """Give the reductions that make up a scalar; one mean where none can be seen.

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
    return found or [Term(None, "mean")]


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
            return [replace(self._known[node], scale=scale)]
        name = type(node).__name__
        saved = getattr(node, "_saved_reduction", None)
        if saved in (_MEAN, _SUM):
            kind: Kind = "sum" if saved == _SUM else "mean"
            return [Term(node, kind, _divisor(node) if kind == "mean" else None, scale)]
        if name.startswith("MeanBackward"):
            weight = getattr(node, "_saved_self_sym_numel", None)
            return [] if _parameters_alone(node) else [Term(node, "mean", weight, scale)]
        if name.startswith(_SUMS) and not _of_one_number(node):
            return [] if _parameters_alone(node) else [Term(node, "sum", None, scale)]
        children = [child for child, _ in node.next_functions]
        scales = [scale * factor for factor in _factors(node, name, len(children))]
        pairs = zip(children, scales, strict=True)
        terms = [term for child, part in pairs for term in self.below(child, part)]
        return [self._divided(term, node) for term in terms] if name == "DivBackward0" else terms

    def _divided(self, term: Term, quotient: Any) -> Term:
        """Tell a sum that the script divides by what it counted, which makes it a mean."""
        by = getattr(quotient, "_saved_other", None)
        if term.kind != "sum" or by is None or by.numel() != 1:
            return term
        weight = by.detach().float()
        if by.device.type == "cpu":
            divisor = float(weight)
            whole = divisor == self._total and self._total != self._share
            if whole or divisor < max(self._share, 2):
                return term  # by a number that does not shrink with the share
        return replace(term, kind="mean", weight=weight)


def _factors(node: Any, name: str, inputs: int) -> list[float | Tensor]:
    """Give by what each input of a node is multiplied; 1 where that can't be seen."""
    if name == "SubBackward0":
        return [1.0, *[-1.0] * (inputs - 1)]
    if name == "NegBackward0":
        return [-1.0] * inputs
    other = getattr(node, "_saved_other", None)
    if name in ("MulBackward0", "DivBackward0") and isinstance(other, Tensor | float | int):
        by = other.detach() if isinstance(other, Tensor) else float(other)
        return [1.0 / by if name == "DivBackward0" else by, *[1.0] * (inputs - 1)]
    return [1.0] * inputs


def _signed(value: Any) -> Any:
    """Give what a node saved; torch shows a negative ``ignore_index`` as an unsigned number."""
    return value - 2**64 if type(value) is int and value >= 2**63 else value


def _divisor(node: Any) -> Tensor | float | None:
    """Give what torch's own loss divides by: weights of targets, or elements."""
    total: Tensor | None = getattr(node, "_saved_total_weight", None)
    if total is not None:
        return total
    inputs = getattr(node, "_saved_self", None)
    return None if inputs is None else float(inputs.numel())


def _of_one_number(node: Any) -> bool:
    """Whether what was summed had been one number already."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    return sizes is not None and len(sizes) == 0


def _parameters_alone(node: Any) -> bool:
    """Whether a node follows from parameters and nothing else."""
    nodes, seen = [node], 0
    while nodes:
        node, seen = nodes.pop(), seen + 1
        name = type(node).__name__
        if name == "AccumulateGrad":
            continue
        if seen > _MAX_NODES or not name.removesuffix("Backward0").startswith(_ELEMENTWISE):
            return False
        below = [child for child, _ in node.next_functions if child is not None]
        if not below:
            return False
        nodes += below
    return True
