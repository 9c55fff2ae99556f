"""Checks that indices are in range before an operator on a device uses them.

An index may point beyond the rows that a trial leaves to a rank, such as one of an edge of a graph.
On the CPU that is an error, by which the guess is dropped. A kernel on a GPU asserts instead, after
which every later call of the process fails there, or it reads whatever lies in memory.

Source: ``aten/src/ATen/native/native_functions.yaml`` of torch 2.13, for the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Range = tuple[Tensor, int, int]  # indices, the least that is allowed, and what all are below
Named = dict[str, Any]
_broadcast: Any = torch.broadcast_tensors  # without annotations


def is_on_host(tensor: Tensor) -> bool:
    """True if operators check the indices into a tensor themselves; one on meta has no numbers."""
    return tensor.is_cpu or tensor.is_meta


def named_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Named:
    """Return an operator's arguments by name."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def check_indices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check the indices that an operator takes on a device, for which the host waits.

    Raises:
        IndexError: If one is out of range.
    """
    rule = _RULES.get(func._schema.name.removeprefix("aten::").removesuffix("_"))
    named = {} if rule is None else named_arguments(func, args, kwargs)
    table: Any = named.get("self", named.get("weight"))
    if rule is None or is_on_host(table):
        return
    for index, least, end in rule(named):
        low, high = torch.stack(index.aminmax()).tolist() if index.numel() else (0, -1)
        if low < least or high >= end:
            wrong = low if low < least else high
            raise IndexError(f"index {wrong} is out of bounds for a size of {end}")


def _by_places(named: Named) -> Iterator[Range]:
    """Yield those of ``x[i, mask, j]``; masks have as many dimensions as they index."""
    tensor, dim = named["self"], 0
    for index in named["indices"]:
        if index is None:
            dim += 1
        elif index.dtype in (torch.bool, torch.uint8):
            dim += index.dim()
        else:
            yield index, -tensor.size(dim), tensor.size(dim)
            dim += 1


def _along(named: Named) -> Iterator[Range]:
    tensor, dim = named["self"], named["dim"]
    yield named["index"], 0, tensor.size(dim) if tensor.dim() else 1


def _along_either_way(named: Named) -> Iterator[Range]:
    for index, _, end in _along(named):
        yield index, -end, end


def _in_all(named: Named) -> Iterator[Range]:
    size = named["self"].numel()
    yield named["index"], -size, size


def _of_rows(named: Named) -> Iterator[Range]:
    table = named["weight"] if "weight" in named else named["self"]
    yield named["indices"], 0, table.size(0)
    if "offsets" in named:
        yield named["offsets"], 0, named["indices"].numel() + 1


def _of_classes(named: Named) -> Iterator[Range]:
    scores, target = named["self"], named["target"]
    target = target[target != named["ignore_index"]]
    yield target, 0, scores.size(1 if scores.dim() > 1 else 0)


def _of_source(named: Named) -> Iterator[Range]:
    """Yield the place in the source of the last number that a mask takes from there."""
    _, mask = _broadcast(named["self"], named["mask"])
    yield mask.sum() - 1, -1, named["source"].numel()


_RULES: dict[str, Callable[[Named], Iterator[Range]]] = {
    **dict.fromkeys(("index", "index_put"), _by_places),
    **dict.fromkeys(
        ("index_select", "index_add", "index_copy", "index_reduce", "gather", "scatter",
         "scatter_add", "scatter_reduce"), _along,
    ),
    "index_fill": _along_either_way,
    **dict.fromkeys(("take", "put"), _in_all),
    **dict.fromkeys(
        ("embedding", "embedding_renorm", "_embedding_bag", "_embedding_bag_forward_only"),
        _of_rows,
    ),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _of_classes),
    "masked_scatter": _of_source,
}  # fmt: skip
