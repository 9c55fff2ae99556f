"""A large output of a split call, whose rows are gathered only when something needs them all.

To the script and to autograd it is the whole tensor: its shape, its graph and its gradients are.
Below autograd, each operator is met here: the few of `row_operators` are computed from the rank's
rows, and for any other the rows of all ranks are gathered, once, and the operator gets the whole.
From then on the whole counts, so that what is written to it in place, or to a view of it, is seen
by all that alias it. All ranks run one script, and so they touch it at the same places.
"""

from __future__ import annotations

import pickle
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fasttrain.shim.data_parallel.split import row_operators
from fasttrain.shim.data_parallel.split.rows import Rows
from fasttrain.shim.hooks.casting import map_tensors

_make_wrapper: Any = torch.Tensor._make_wrapper_subclass
_disabled: Any = torch._C._disabled_torch_function_impl


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rows of a whole tensor a rank has.

    Attributes:
        rows: How the rows are dealt.
        dim: The dimension of the batch.
        meet: Sees that all ranks are at the same place, before they compute together.
    """

    rows: Rows
    dim: int
    meet: Callable[[], None]


_UNGATHERED: deque[weakref.ref[LazyRows]] = deque()


class _Visitor(pickle.Pickler):
    """Puts together what it meets in the place of pickling it, and writes nothing."""

    def __init__(self) -> None:
        super().__init__(self, protocol=pickle.HIGHEST_PROTOCOL)

    def write(self, _: Any) -> None:
        """Drop it."""

    def persistent_id(self, value: Any) -> str | None:
        """Return what stands for a tensor; None for what is to be looked into."""
        if not isinstance(value, Tensor):
            return None
        whole(value)
        return ""


def gather_in(value: Any) -> None:
    """Put together the tensors in what rank 0 is about to save alone; every rank calls this."""
    while _UNGATHERED and ((tensor := _UNGATHERED[0]()) is None or tensor.part is None):
        _UNGATHERED.popleft()
    if _UNGATHERED:
        with suppress(Exception):  # which the script gets when it is saved
            _Visitor().dump(value)


class LazyRows(Tensor):
    """A whole tensor of which this rank has its rows.

    Attributes:
        placement: Which ones.
    """

    placement: Placement
    _part: Tensor | None
    _scale: int
    _whole: Tensor | None
    _first: Tensor | None
    _viewed: LazyRows | None
    _replay: Callable[[Tensor], Tensor] | None

    __torch_function__ = _disabled

    @staticmethod
    def __new__(
        cls,
        part: Tensor,
        like: Tensor,
        placement: Placement,
        base: LazyRows | None = None,
        view: Callable[[Tensor], Tensor] | None = None,
        scale: int = 1,
    ) -> LazyRows:
        """Stand for a whole tensor of the sizes and strides of ``like``, or for a view of one.

        ``part`` is ``scale`` times this rank's rows: the number of ranks for gradients, which have
        to be so much larger inside of the split call.
        """
        tensor: LazyRows = _make_wrapper(
            cls, like.size(), strides=like.stride(), dtype=part.dtype, device=part.device
        )
        tensor.placement, tensor._part, tensor._whole = placement, part, None
        tensor._first = None
        tensor._viewed, tensor._replay, tensor._scale = base, view, scale
        if base is None:
            _UNGATHERED.append(weakref.ref(tensor))
        return tensor

    def __init__(self, *_: Any, **__: Any) -> None:
        """Everything is done: torch would look for a constructor's arguments."""

    @property
    def scaled_part(self) -> tuple[Tensor | None, int]:
        """This rank's rows times a number, and that; None where the whole counts instead."""
        viewed = self._viewed
        if self._part is not None and viewed is not None and viewed.scaled_part[0] is None:
            self._part = None
        return self._part, self._scale

    @property
    def part(self) -> Tensor | None:
        """This rank's rows; None where the whole has been put together, and counts."""
        part, scale = self.scaled_part
        if part is not None and scale != 1:
            self._part, self._scale = part / scale, 1
        return self._part

    def own_rows(self, rows: Rows, dim: int, scale: int = 1) -> Tensor | None:
        """Return this rank's rows times a number; None where it has not these rows alone."""
        if self.placement.dim != dim or self.placement.rows != rows:
            return None
        if self._scale == scale:
            return self.scaled_part[0]
        return None if self.part is None else self.part * scale

    def whole(self) -> Tensor:
        """Return a plain tensor with all rows, which this one stands for from here on."""
        if self._whole is None:
            with torch.inference_mode(mode=False), torch.no_grad():
                if self._viewed is not None:
                    assert self._replay is not None
                    viewed = self._viewed.whole()
                    self._whole = self._replay(self._viewed._first_or(viewed))
                else:
                    part = self.part
                    assert part is not None
                    self.placement.meet()
                    self._whole = self.placement.rows.gather(part, self.placement.dim)
        self._part = None
        return self._whole

    def _first_or(self, now: Tensor) -> Tensor:
        """Return the whole tensor in the shape that it was made in."""
        return now if self._first is None else self._first

    def reshape_by(self, func: Any, args: Any, kwargs: Any) -> LazyRows:
        """Have an operator change the shape in place, as the first of its arguments.

        Views that were taken before go on to be those of the shape that they were taken of.
        """
        with torch.no_grad():
            now = self.whole()
            self._first = self._first_or(now.view_as(now))
        func(now, *args[1:], **kwargs)
        with torch._C._DisableTorchDispatch():  # of the tensor that stands for it
            func(*args, **kwargs)
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute an operator from the rank's rows, or from all rows."""
        kwargs = kwargs or {}
        rule = row_operators.RULES.get(func)
        if rule is not None:
            found = rule(func, args, kwargs)
            if found is not NotImplemented:
                return found
        if torch.Tag.inplace_view in func.tags and isinstance(args[0], LazyRows):
            return args[0].reshape_by(func, args, kwargs)
        return _on_whole(func, args, kwargs)

    # What reads memory past the operators

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        """Return what the whole tensor shows."""
        return repr(linked(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the whole tensor."""
        whole: Any = linked(self)
        return whole.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy the whole tensor."""
        return linked(self).__deepcopy__(memo)  # type: ignore[no-untyped-call]


def _through_whole(name: str) -> None:
    def method(tensor: LazyRows, *args: Any, **kwargs: Any) -> Any:
        return getattr(linked(tensor), name)(*args, **kwargs)

    method.__name__ = name
    setattr(LazyRows, name, method)


for _name in (
    "numpy", "tolist", "data_ptr", "untyped_storage", "storage", "_typed_storage", "__array__",
    "__dlpack__", "is_shared", "share_memory_", "apply_", "map_", "map2_",
):  # fmt: skip
    if hasattr(Tensor, _name):
        _through_whole(_name)


class _Linked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: LazyRows) -> Tensor:  # noqa: ARG004 - torch's
        return tensor.whole().view_as(tensor.whole())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004 - torch's
        return gradient


def whole(tensor: Tensor) -> Tensor:
    """Return a plain tensor with all rows, without a graph where they had to be put together."""
    return tensor.whole() if isinstance(tensor, LazyRows) else tensor


def linked(tensor: Tensor) -> Tensor:
    """Return a plain tensor with all rows, which has the tensor's place in the graph."""
    if not isinstance(tensor, LazyRows):
        return tensor
    if tensor.requires_grad and torch.is_grad_enabled():
        apply: Any = _Linked.apply
        plain: Tensor = apply(tensor)
        return plain
    return tensor.whole()


def gather_lazily(part: Tensor, dim: int, rows: Rows, meet: Callable[[], None]) -> Tensor:
    """Return a tensor that stands for the rows of all ranks; a plain one where that doesn't pay.

    Args:
        part: This rank's rows.
        dim: The dimension of the batch.
        rows: How they are dealt.
        meet: Sees that all ranks are at the same place.
    """
    block = part.size(dim) // rows.own
    small = part.numel() // rows.own * rows.count < row_operators.LARGE
    usual = type(part) is Tensor and part.layout is torch.strided
    if small or not usual or part.is_quantized or part.is_complex():
        return rows.gather(part, dim)
    sizes = [*part.shape]
    sizes[dim] = block * rows.count
    like = torch.empty(sizes, device="meta")
    return LazyRows(part.detach().contiguous(), like, Placement(rows, dim, meet))


def _on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator with whole tensors."""
    wholes: dict[int, LazyRows] = {}

    def put(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, LazyRows):
            return tensor
        whole = tensor.whole()
        wholes[id(whole)] = tensor
        return whole

    args, kwargs = map_tensors(args, put), map_tensors(kwargs, put)
    result = func(*args, **kwargs)
    if not func._schema.is_mutable:
        return result
    # What an operator changes in place it returns
    return map_tensors(result, lambda tensor: wholes.get(id(tensor), tensor))


row_operators.bind(LazyRows)
