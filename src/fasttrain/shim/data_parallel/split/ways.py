"""A way to split a call: how its arguments are cut, and its outputs put together."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fasttrain.shim.data_parallel.split.candidates import Dimensions
from fasttrain.shim.data_parallel.split.rows import Gather, Order, Rows
from fasttrain.shim.hooks.containers import map_tensors, tensors_in

MOST_ALONG = 1 << 16  # bytes of an output that ranks exchange before they know that it is wanted
MOST_NUMBERS = 4096  # compared between ranks, of an output without rows


@dataclass(frozen=True, slots=True)
class Split:
    """A way to split a call.

    Attributes:
        inputs: The batch dimension of each tensor among the arguments.
        outputs: The batch dimension of each tensor among the outputs.
        kept: Attributes with tensors that the call sets in its modules: the module's number in the
            order of `Module.modules`, the name, and the batch dimensions of the tensors.
        inner: True if the call returns or keeps tensors with rows along with a number that is
            computed from them.
        same: For each output tensor, the number of the argument that it is, or None.
        ndims: The number of dimensions of each tensor among the outputs.
        changed: All attributes and buffers that such calls replace or write to in their modules.
        orders: The memory order of each tensor among the outputs of the whole call.
    """

    inputs: Dimensions
    outputs: Dimensions = ()
    kept: tuple[tuple[int, str, Dimensions], ...] = ()
    inner: bool = False
    same: Dimensions = ()
    ndims: tuple[int, ...] = ()
    changed: tuple[tuple[int, str], ...] = ()
    orders: tuple[Order, ...] = ()

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

    @property
    def places(self) -> dict[tuple[int, str], bool]:
        """The attributes in which it leaves tensors; True if these have rows."""
        return {(n, name): any(dim is not None for dim in dims) for n, name, dims in self.kept}

    def with_earlier(self, other: Split) -> Split:
        """Return this split with what an earlier one has changed, and this one hasn't.

        What has rows is left out, as it is put together after each call that is split this way.
        """
        rows = {place for place, has_rows in other.places.items() if has_rows}
        changed = dict.fromkeys([*self.changed, *(p for p in other.changed if p not in rows)])
        kept = [each for each in other.kept if each[:2] not in {*self.changed, *rows}]
        return replace(self, kept=(*self.kept, *kept), changed=tuple(changed))

    def form(
        self,
        module: Module,
        output: Any,
        rows: Rows,
        written: Sequence[Tensor] = (),
        *,
        read: bool = False,
    ) -> tuple[str, list[float]] | None:
        """Return what all ranks must have alike in what a split call has made.

        Args:
            module: The module that was called.
            output: The output for this rank's rows.
            rows: The batch's rows.
            written: Buffers that the call may have written to.
            read: Read from devices, too.

        Returns:
            The kinds and sizes of all tensors, but for the number of rows, and numbers that stand
            for the values of those without rows; None if the form isn't that of earlier calls.
        """
        made = [(tensors_in(output), self.outputs)]
        parts = list(Module.modules(module)) if self.kept else []
        made += [(tensors_in(vars(parts[n]).get(name)), dims) for n, name, dims in self.kept]
        if any(len(tensors) != len(dims) for tensors, dims in made):
            return None
        pairs = [pair for of in made for pair in zip(*of, strict=True)]
        ndims = self.ndims or [tensor.dim() for tensor, _ in pairs]
        if any(tensor.dim() != ndim for (tensor, _), ndim in zip(pairs, ndims, strict=False)):
            return None  # such as by squeeze(), which drops the rows where there is one
        text, numbers, own = "", [], rows.own
        for tensor, dim in pairs:
            shape: Sequence[int] = tensor.shape if not tensor.is_nested else ()
            if tensor.is_nested and dim is not None:
                shape = (*[0] * dim, tensor.size(dim))
            kind = _kind(tensor.dtype, shape, dim, own)
            if kind is None:
                return None
            text += kind
        alone = [t for t, dim in pairs if dim is None and t.numel() <= MOST_NUMBERS]
        for tensor in (*alone, *written):
            if (tensor.is_cpu or read) and _is_comparable(tensor):
                number = _number_of(tensor)
                finite = math.isfinite(number)
                numbers.append(number if finite else 0.0)
                text += "" if finite else str(number)
        return text, numbers

    def small_part(self, output: Any, rows: Rows) -> Tensor | None:
        """Return this rank's rows of the output, if they are all that is gathered and few."""
        if self.outputs != (0,) or self.same not in ((), (None,)):
            return None
        if rows.count % rows.ranks.world_size:
            return None
        if type(output) is not Tensor or not output.is_cpu or not _is_comparable(output):
            return None
        small = output.nbytes <= MOST_ALONG and output.is_contiguous()
        return output.detach() if small else None

    def with_rows(self, module: Module, output: Any) -> list[Tensor]:
        """Return the tensors with rows that a call returns or keeps along with results of them."""
        if not self.inner:
            return []
        own = self.same or (None,) * len(self.outputs)
        found = list(zip(tensors_in(output), self.outputs, own, strict=True))
        parts = list(Module.modules(module)) if self.kept else []
        for number, name, dims in self.kept:
            tensors = tensors_in(vars(parts[number])[name])
            found += zip(tensors, dims, [None] * len(dims), strict=True)
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
            if any(dim is not None for dim in dims):
                vars(parts[number])[name] = with_all_rows(vars(parts[number])[name], dims, rows)
        known: dict[int, Tensor] = {}
        if any(at is not None for at in self.same):
            own = zip(tensors_in(output), self.same, strict=True)
            known = {id(tensor): inputs[at] for tensor, at in own if at is not None}
        # A single row doesn't show where its dimension lies; of more the current call says it.
        orders = self.orders if rows.own == 1 else ()
        return with_all_rows(output, self.outputs, rows, gather, known, orders)


@functools.lru_cache(1024)
def _kind(dtype: torch.dtype, shape: Sequence[int], dim: int | None, rows: int) -> str | None:
    """Return a tensor's type and sizes, with those of a row in its dimension ``dim`` of rows."""
    sizes = list(shape)
    if dim is not None:
        if len(sizes) <= dim or sizes[dim] % rows:
            return None
        sizes[dim] //= rows
    return f"{dtype}{sizes}"


def _is_comparable(tensor: Tensor) -> bool:
    plain = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
    return plain and not tensor.is_complex()


def _number_of(tensor: Tensor) -> float:
    """Return a tensor's number, or one for its numbers, which cancels none of them."""
    values = tensor.detach()
    if values.numel() == 1:
        return float(values)
    values = values.reshape(-1).float()
    if values.numel() <= MOST_NUMBERS:
        values = values * torch.arange(1, values.numel() + 1, device=values.device)
    return float(torch.linalg.vector_norm(values))


def with_all_rows(
    value: Any,
    dims: Dimensions,
    rows: Rows,
    gather: Gather | None = None,
    known: Mapping[int, Tensor] | None = None,
    orders: Sequence[Order] = (),
) -> Any:
    """Return a value with the rows of all ranks in its tensors.

    Args:
        value: Containers of tensors with this rank's rows.
        dims: The batch dimension of each tensor in it.
        rows: The batch's rows.
        gather: Returns a tensor with all rows from one with this rank's.
        known: Replacements of tensors, by the tensors' ids.
        orders: The memory order of each whole tensor, if known.
    """
    given = itertools.zip_longest(dims, orders)
    whole: dict[int, Tensor] = dict(known or {})

    def gathered(tensor: Tensor) -> Tensor:
        dim, order = next(given)
        if dim is None and id(tensor) not in whole:
            return tensor
        if id(tensor) not in whole:
            assert dim is not None
            whole[id(tensor)] = rows.give(tensor, dim, gather, order)
        return whole[id(tensor)]

    return map_tensors(value, gathered)
