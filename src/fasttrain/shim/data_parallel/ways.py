"""A way to split a call: which dimension of which tensor is the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module

from fasttrain.shim.casting import map_tensors
from fasttrain.shim.data_parallel.agreement import tensors_in
from fasttrain.shim.data_parallel.candidates import Dimensions
from fasttrain.shim.data_parallel.rows import Gather, Rows


@dataclass(frozen=True, slots=True)
class Split:
    """A way to split a call.

    Attributes:
        inputs: The dimension of the batch of each tensor among the arguments.
        outputs: Of each tensor that the call gives.
        kept: Attributes that the call leaves in its modules, each with the number of the module in
            the order of `Module.modules`, and the dimensions of their tensors.
        inner: Whether the call gives tensors with rows beside a number that it has made of them.
    """

    inputs: Dimensions
    outputs: Dimensions = ()
    kept: tuple[tuple[int, str, Dimensions], ...] = ()
    inner: bool = False

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
        """Whether a call gave what calls of its kind have given before."""
        tensors = tensors_in(output)
        return len(tensors) == len(self.outputs) and all(
            dim is None or (tensor.dim() > dim and tensor.size(dim) % rows.own == 0)
            for tensor, dim in zip(tensors, self.outputs, strict=True)
        )

    def with_rows(self, output: Any) -> list[Tensor]:
        """Return the tensors with rows that a call gives beside what it has made of them."""
        pairs = zip(tensors_in(output), self.outputs, strict=True) if self.inner else ()
        return [tensor for tensor, dim in pairs if dim is not None]

    def put_together(self, module: Module, output: Any, rows: Rows, gather: Gather) -> Any:
        """Return what the whole call gives, from what each rank's call has given and left.

        Args:
            module: That was called.
            output: What its call with this rank's rows has given.
            rows: Of the batch.
            gather: Makes a tensor with all rows of one with the rank's.
        """
        parts = list(Module.modules(module)) if self.kept else []
        for number, name, dims in self.kept:
            vars(parts[number])[name] = give(vars(parts[number])[name], dims, rows)
        return give(output, self.outputs, rows, gather)


def give(value: Any, dims: Dimensions, rows: Rows, gather: Gather | None = None) -> Any:
    """Return containers with the rows of all ranks in their tensors."""
    given = iter(dims)
    whole: dict[int, Tensor] = {}

    def give_one(tensor: Tensor) -> Tensor:
        dim = next(given)
        if dim is None:
            return tensor
        if id(tensor) not in whole:
            whole[id(tensor)] = rows.give(tensor, dim, gather)
        return whole[id(tensor)]

    return map_tensors(value, give_one)
