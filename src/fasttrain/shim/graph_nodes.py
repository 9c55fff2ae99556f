"""What single nodes of an autograd graph say of the operation that made them.

Source: ``tools/autograd/derivatives.yaml`` of torch 2.13, for the names of what nodes save.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_MAX_NODES = 64  # of what may follow from parameters alone
# What a penalty on the parameters is made of, which has nothing to do with the batch.
_ELEMENTWISE = {
    "Pow", "Mul", "Abs", "Add", "Sub", "Div", "Neg", "Sum", "Mean", "Norm", "LinalgVectorNorm",
    "View", "Reshape", "Select", "Slice", "T", "Sqrt", "ToCopy", "Stack", "Cat", "Clone", "Square",
    "UnsafeView", "ReshapeAlias", "Permute", "Transpose", "MseLoss", "L1Loss", "SmoothL1Loss",
}  # fmt: skip
_PRODUCTS = {"Mm", "Bmm", "Matmul"}  # of parameters with each other
_NAMES: dict[type, str] = {}  # of operations, by the types of their nodes


def operator_of(node: Any) -> str:
    """Give what a node is the gradient of, such as ``Mul``."""
    kind = type(node)
    name = _NAMES.get(kind)
    if name is None:
        name = _NAMES[kind] = kind.__name__.rstrip("0123456789").removesuffix("Backward")
    return name


def reduced(node: Any) -> int:
    """Give how many elements a reduction took."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is not None:
        return math.prod(sizes)
    numel = getattr(node, "_saved_self_sym_numel", None)
    if numel is not None:
        return int(numel)
    saved = getattr(node, "_saved_self", None)
    return int(saved.numel()) if isinstance(saved, Tensor) else 0


def of_one_number(node: Any) -> bool:
    """Whether what was reduced had been one number already."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    return sizes is not None and len(sizes) == 0


def factors(node: Any, name: str, inputs: int) -> list[float | Tensor]:
    """Give by what each input of a node is multiplied; 1 where that can't be seen."""
    alpha = float(getattr(node, "_saved_alpha", 1.0))
    if name == "Sub":
        return [1.0, *[-alpha] * (inputs - 1)]
    if name == "Add":
        return [1.0, *[alpha] * (inputs - 1)]
    if name == "Neg":
        return [-1.0] * inputs
    other = getattr(node, "_saved_other", None)
    if name in ("Mul", "Div") and isinstance(other, Tensor | float | int):
        by = other.detach() if isinstance(other, Tensor) else float(other)
        return [1.0 / by if name == "Div" else by, *[1.0] * (inputs - 1)]
    return [1.0] * inputs


def divisor(node: Any) -> Tensor | float | None:
    """Give what torch's own loss divides by: weights of targets, or elements."""
    total: Tensor | None = getattr(node, "_saved_total_weight", None)
    if total is not None:
        return total
    inputs = getattr(node, "_saved_self", None)
    return None if inputs is None else float(inputs.numel())


def follows_from_parameters(node: Any) -> bool:
    """Whether a node follows from parameters and constants of their shape, and nothing else."""
    nodes, seen = [node], 0
    while nodes:
        node, seen = nodes.pop(), seen + 1
        name = operator_of(node)
        if name == "AccumulateGrad":
            continue
        if name not in _ELEMENTWISE and name not in _PRODUCTS:
            return False
        below = [child for child, _ in node.next_functions]
        there = [child for child in below if child is not None]
        if seen > _MAX_NODES or not there:
            return False
        if name in _PRODUCTS and len(there) == len(below):
            nodes += there
            continue
        if name not in _ELEMENTWISE or _grows(node, name, there):
            return False
        nodes += there
    return True


def _grows(node: Any, name: str, below: list[Any]) -> bool:
    """Whether an operation gives more elements than it has from the graph: it met samples."""
    if name in ("Stack", "Cat"):
        return False
    return numel(node) > max(numel(child) for child in below)


def numel(node: Any) -> int:
    """Give how many elements the result of a node has."""
    if type(node).__name__ == "AccumulateGrad":
        return int(node.variable.numel())
    shape = node._input_metadata[0].shape if node._input_metadata else ()
    return math.prod(shape)


def is_number(other: Any) -> bool:
    """Whether an operand was a number of Python's, and not a tensor that the script counted."""
    if not isinstance(other, Tensor):
        return isinstance(other, float | int)
    if other.dim():
        return False
    narrow = torch.float16 if other.is_floating_point() else torch.int8
    return torch.result_type(other, torch.zeros((), dtype=narrow, device=other.device)) is narrow
