"""A way to split a call: which dimension of which tensor is the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fasttrain.shim.data_parallel.split.agreement import tensors_in
from fasttrain.shim.data_parallel.split.rows import Gather, Rows
from fasttrain.shim.hooks.casting import map_tensors

# Which dimension of which argument may be the batch: guesses from sizes, for a trial to decide.


Dimensions = tuple[int | None, ...]  # of each tensor of a call; None for one that isn't split
MOST = 6  # guesses that are tried


def candidates(inputs: Sequence[Tensor], world_size: int) -> list[Dimensions]:
    """Return guesses, the likelier ones first.

    Args:
        inputs: The tensors among the arguments of a call.
        world_size: Number of ranks; a batch of fewer rows isn't split.
    """
    found = dict.fromkeys(_guesses(inputs))
    return [dims for dims in found if _rows(inputs, dims) >= world_size][:MOST]


def row_count(inputs: Sequence[Tensor], dims: Dimensions) -> int:
    """Return the rows of a call's batch; 0 where the sizes of the arguments don't agree."""
    sizes = {
        tensor.size(dim) if tensor.dim() > dim else 0
        for tensor, dim in zip(inputs, dims, strict=True)
        if dim is not None
    }
    return sizes.pop() if len(sizes) == 1 else 0


_rows = row_count


def _guesses(inputs: Sequence[Tensor]) -> Iterator[Dimensions]:
    dense = [(at, t) for at, t in enumerate(inputs) if _has_rows(t)]
    for size in dict.fromkeys(t.size(0) for _, t in dense):
        split = [at for at, t in dense if t.size(0) == size]
        yield _dims(inputs, dict.fromkeys(split, 0))
        if len(split) > 1:
            for left_out in reversed(split):
                yield _dims(inputs, {at: 0 for at in split if at != left_out})
    for size in dict.fromkeys(t.size(1) for _, t in dense if t.dim() > 1):
        second = {at: 1 for at, t in dense if t.dim() > 1 and t.size(1) == size}
        first = {at: 0 for at, t in dense if t.dim() == 1 and t.size(0) == size}
        yield _dims(inputs, {**first, **second})


def _has_rows(tensor: Tensor) -> bool:
    """Return whether a part of a tensor can be taken by its rows."""
    return bool(tensor.dim()) and tensor.layout is torch.strided and not tensor.is_nested


def _dims(inputs: Sequence[Tensor], split: dict[int, int]) -> Dimensions:
    return tuple(split.get(at) for at in range(len(inputs)))


@dataclass(frozen=True, slots=True)
class Split:
    """A way to split a call.

    Attributes:
        inputs: The dimension of the batch of each tensor among the arguments.
        outputs: Of each tensor that the call gives.
        kept: Attributes that the call leaves in its modules, each with the number of the module in
            the order of `Module.modules`, and the dimensions of their tensors.
        inner: Whether the call gives tensors with rows beside a number that it has made of them.
        same: Of each tensor that the call gives, the number of the argument that it is, or None.
    """

    inputs: Dimensions
    outputs: Dimensions = ()
    kept: tuple[tuple[int, str, Dimensions], ...] = ()
    inner: bool = False
    same: Dimensions = ()

    def cut(self, args: Any, kwargs: Any, rows: Rows) -> Any:
        """Return the arguments with this rank's rows."""
        given = iter(self.inputs)
        taken: dict[int, Tensor] = {}

        def take(tensor: Tensor) -> Tensor:
            dim = next(given)
            if dim is None:
                return tensor if not tensor.requires_grad else rows.share(tensor)
            if id(tensor) not in taken:
                taken[id(tensor)] = rows.take(tensor, dim)
            return taken[id(tensor)]

        return map_tensors(args, take), map_tensors(kwargs, take)

    def fits(self, output: Any, rows: Rows) -> bool:
        """Return whether a call gave what calls of its kind have given before."""
        tensors = tensors_in(output)
        return len(tensors) == len(self.outputs) and all(
            dim is None or (tensor.dim() > dim and tensor.size(dim) % rows.own == 0)
            for tensor, dim in zip(tensors, self.outputs, strict=True)
        )

    def with_rows(self, output: Any) -> list[Tensor]:
        """Return the tensors with rows that a call gives beside what it has made of them."""
        if not self.inner:
            return []
        own = self.same or (None,) * len(self.outputs)
        found = zip(tensors_in(output), self.outputs, own, strict=True)
        return [tensor for tensor, dim, at in found if dim is not None and at is None]

    def put_together(
        self, module: Module, output: Any, rows: Rows, gather: Gather, inputs: Sequence[Tensor]
    ) -> Any:
        """Return what the whole call gives, from what each rank's call has given and left.

        Args:
            module: That was called.
            output: What its call with this rank's rows has given.
            rows: Of the batch.
            gather: Makes a tensor with all rows of one with the rank's.
            inputs: The tensors among the arguments, as the script has them.
        """
        parts = list(Module.modules(module)) if self.kept else []
        for number, name, dims in self.kept:
            vars(parts[number])[name] = give(vars(parts[number])[name], dims, rows)
        if any(at is not None for at in self.same):
            own = zip(tensors_in(output), self.same, strict=True)
            known = {id(tensor): inputs[at] for tensor, at in own if at is not None}
            return give(output, self.outputs, rows, gather, known)
        return give(output, self.outputs, rows, gather)


def give(
    value: Any,
    dims: Dimensions,
    rows: Rows,
    gather: Gather | None = None,
    known: Mapping[int, Tensor] | None = None,
) -> Any:
    """Return containers with the rows of all ranks in their tensors.

    Args:
        value: With the rank's rows.
        dims: The dimension of the batch of each tensor in it.
        rows: Of the batch.
        gather: Makes a tensor with all rows of one with the rank's.
        known: What is to take the place of tensors, by their ids.
    """
    given = iter(dims)
    whole: dict[int, Tensor] = dict(known or {})

    def give_one(tensor: Tensor) -> Tensor:
        dim = next(given)
        if dim is None and id(tensor) not in whole:
            return tensor
        if id(tensor) not in whole:
            assert dim is not None
            whole[id(tensor)] = rows.give(tensor, dim, gather)
        return whole[id(tensor)]

    return map_tensors(value, give_one)
