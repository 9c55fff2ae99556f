"""A way to split a call: which dimension of which tensor is the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fasttrain.shim.data_parallel.split.rows import Gather, Rows
from fasttrain.shim.hooks.casting import map_tensors, tensors_in

# The batch dimension of each tensor of a call; None for a tensor that isn't split.
Dimensions = tuple[int | None, ...]
MOST = 6  # guesses tried per call


def candidates(inputs: Sequence[Tensor], world_size: int) -> list[Dimensions]:
    """Return guesses from sizes at the batch dimensions, likelier ones first; a trial decides.

    Args:
        inputs: The tensors among the arguments of a call.
        world_size: Number of ranks; a batch of fewer rows isn't split.
    """
    found = dict.fromkeys(_guesses(inputs))
    return [dims for dims in found if _rows(inputs, dims) >= world_size][:MOST]


def row_count(inputs: Sequence[Tensor], dims: Dimensions) -> int:
    """Return the number of rows in a call's batch; 0 if the arguments' sizes differ."""
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
    """True if rows can be cut out of a tensor."""
    return bool(tensor.dim()) and tensor.layout is torch.strided and not tensor.is_nested


def _dims(inputs: Sequence[Tensor], split: dict[int, int]) -> Dimensions:
    return tuple(split.get(at) for at in range(len(inputs)))


@dataclass(frozen=True, slots=True)
class Split:
    """A way to split a call.

    Attributes:
        inputs: The batch dimension of each tensor among the arguments.
        outputs: The batch dimension of each tensor among the outputs.
        kept: Attributes that the call sets in its modules: the module's number in the order of
            `Module.modules`, the name, and the batch dimensions of the tensors.
        inner: True if the call returns tensors with rows along with a number computed from them.
        same: For each output tensor, the number of the argument that it is, or None.
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
        """True if a call's outputs have the form of earlier calls of its kind."""
        tensors = tensors_in(output)
        return len(tensors) == len(self.outputs) and all(
            dim is None or (tensor.dim() > dim and tensor.size(dim) % rows.own == 0)
            for tensor, dim in zip(tensors, self.outputs, strict=True)
        )

    def with_rows(self, output: Any) -> list[Tensor]:
        """Return the tensors with rows that a call returns along with results of them."""
        if not self.inner:
            return []
        own = self.same or (None,) * len(self.outputs)
        found = zip(tensors_in(output), self.outputs, own, strict=True)
        return [tensor for tensor, dim, at in found if dim is not None and at is None]

    def put_together(
        self, module: Module, output: Any, rows: Rows, gather: Gather, inputs: Sequence[Tensor]
    ) -> Any:
        """Return the whole call's output from each rank's, and gather attributes of modules.

        Args:
            module: The module that was called.
            output: The output for this rank's rows.
            rows: The batch's rows.
            gather: Returns a tensor with all rows from one with this rank's.
            inputs: The tensors among the arguments, as the script has passed them.
        """
        parts = list(Module.modules(module)) if self.kept else []
        for number, name, dims in self.kept:
            vars(parts[number])[name] = with_all_rows(vars(parts[number])[name], dims, rows)
        if any(at is not None for at in self.same):
            own = zip(tensors_in(output), self.same, strict=True)
            known = {id(tensor): inputs[at] for tensor, at in own if at is not None}
            return with_all_rows(output, self.outputs, rows, gather, known)
        return with_all_rows(output, self.outputs, rows, gather)


def with_all_rows(
    value: Any,
    dims: Dimensions,
    rows: Rows,
    gather: Gather | None = None,
    known: Mapping[int, Tensor] | None = None,
) -> Any:
    """Return a value with the rows of all ranks in its tensors.

    Args:
        value: Containers of tensors with this rank's rows.
        dims: The batch dimension of each tensor in it.
        rows: The batch's rows.
        gather: Returns a tensor with all rows from one with this rank's.
        known: Replacements of tensors, by the tensors' ids.
    """
    given = iter(dims)
    whole: dict[int, Tensor] = dict(known or {})

    def gathered(tensor: Tensor) -> Tensor:
        dim = next(given)
        if dim is None and id(tensor) not in whole:
            return tensor
        if id(tensor) not in whole:
            assert dim is not None
            whole[id(tensor)] = rows.give(tensor, dim, gather)
        return whole[id(tensor)]

    return map_tensors(value, gathered)
