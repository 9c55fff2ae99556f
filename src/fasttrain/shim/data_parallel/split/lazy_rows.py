"""A large output of a split call, whose rows are gathered only when something needs all of them.

To the script and to autograd it is the whole tensor, with its shape, graph and gradients. Below
autograd each operator is intercepted here. The few of `row_operators` are computed from the rank's
rows. For any other one the rows of all ranks are gathered, once, and the operator gets the whole
tensor. From then on the whole tensor holds the content, so that all its aliases see what is written
to it or to a view of it in place. All ranks run one script, and so use it at the same lines.
"""

from __future__ import annotations

import functools
import pickle
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fasttrain.model.vendors import LIKE_CUDA
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.data_parallel.split import row_operators
from fasttrain.shim.data_parallel.split.rows import (
    Order,
    Rows,
    dense_strides,
    memory_order,
)
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.containers import map_tensors
from fasttrain.shim.hooks.device_clock import module_of
from fasttrain.shim.hooks.dynamo import UserCompile, pass_over
from fasttrain.shim.hooks.seams import Applying

_make_wrapper: Any = torch.Tensor._make_wrapper_subclass
# As FakeTensor does: C++ code that reads its memory gets an error, and not a null pointer.
_throw_if_read: Any = torch._C._set_throw_on_mutable_data_ptr
_disabled: Any = torch._C._disabled_torch_function_impl


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rows of a whole tensor a rank has.

    Attributes:
        rows: How the rows are distributed.
        dim: The dimension of the batch.
        meet: Checks that all ranks are at the same line, before they communicate.
    """

    rows: Rows
    dim: int
    meet: Callable[[], None]


_WITH_OPERATORS = ("fasttrain.", "torch.")  # modules whose Functions consist of operators
_UNGATHERED: dict[int, weakref.ref[LazyRows]] = {}  # those that were made and live, by id


def _forget(key: int, _: object) -> None:
    _UNGATHERED.pop(key, None)


class _Visitor(pickle.Pickler):
    """Gathers the tensors that it visits instead of pickling them, and writes nothing."""

    def __init__(self) -> None:
        super().__init__(self, protocol=pickle.HIGHEST_PROTOCOL)

    def write(self, _: Any) -> None:
        """Drop it."""

    def persistent_id(self, value: Any) -> str | None:
        """Return a dummy id for a tensor; None for anything else, which is searched."""
        if not isinstance(value, Tensor):
            return None
        whole(value)
        return ""


def gather_in(value: Any) -> None:
    """Gather the tensors in a value that rank 0 is about to save alone; every rank calls this."""
    for key, ref in list(_UNGATHERED.items()):
        if (tensor := ref()) is None or tensor.part is None:
            _UNGATHERED.pop(key, None)
    if _UNGATHERED:
        with suppress(Exception):  # saving the value raises it again, to the script
            _Visitor().dump(value)


class LazyRows(Tensor):
    """A whole tensor of which this rank has only its rows.

    Attributes:
        placement: Which rows.
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
        """Create one with the sizes and strides of ``like``, or a view of another one.

        ``part`` is ``scale`` times this rank's rows. For gradients that is the number of ranks, by
        which they are larger inside a split call (see `rows`).
        """
        tensor: LazyRows = _make_wrapper(
            cls, like.size(), strides=like.stride(), dtype=part.dtype, device=part.device
        )
        _throw_if_read(tensor)
        tensor.placement, tensor._part, tensor._whole = placement, part, None
        tensor._first = None
        tensor._viewed, tensor._replay, tensor._scale = base, view, scale
        if base is None:
            key = id(tensor)
            _UNGATHERED[key] = weakref.ref(tensor, functools.partial(_forget, key))
        return tensor

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing; without it object.__init__ would refuse the arguments."""

    @property
    def scaled_part(self) -> tuple[Tensor | None, int]:
        """This rank's rows times a scale (None if the whole has replaced them), and the scale."""
        viewed = self._viewed
        if self._part is not None and viewed is not None and viewed.scaled_part[0] is None:
            self._part = None
        return self._part, self._scale

    @property
    def part(self) -> Tensor | None:
        """This rank's rows; None if the whole tensor has replaced them."""
        part, scale = self.scaled_part
        if part is not None and scale != 1:
            self._part, self._scale = part / scale, 1
        return self._part

    def own_rows(self, rows: Rows, dim: int, scale: int = 1) -> Tensor | None:
        """Return this rank's rows times a scale; None if it has other rows, or all."""
        if self.placement.dim != dim or self.placement.rows != rows:
            return None
        if self._scale == scale:
            return self.scaled_part[0]
        return None if self.part is None else self.part * scale

    def whole(self) -> Tensor:
        """Return a plain tensor with all rows, which holds this one's content from now on."""
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
                    self._whole = self.placement.rows.gather(
                        part, self.placement.dim, memory_order(self)
                    )
                    _free_after_this_stream(part)
        self._part = None
        return self._whole

    def _first_or(self, now: Tensor) -> Tensor:
        """Return the whole tensor in the shape in which it was created."""
        return now if self._first is None else self._first

    def reshape_by(self, func: Any, args: Any, kwargs: Any) -> LazyRows:
        """Run an operator that changes this tensor's shape in place.

        Earlier views remain views of the earlier shape.
        """
        with torch.no_grad():
            now = self.whole()
            self._first = self._first_or(now.view_as(now))
        func(now, *args[1:], **kwargs)
        with torch._C._DisableTorchDispatch():  # on the wrapper itself
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
        # Such as t_ and squeeze_: the wrapper's own sizes have to change, too.
        if torch.Tag.inplace_view in func.tags and isinstance(args[0], LazyRows):
            return args[0].reshape_by(func, args, kwargs)
        return _on_whole(func, args, kwargs)

    # --- methods that read memory without operators

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        """Return the whole tensor's repr."""
        return repr(linked(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the whole tensor."""
        whole: Any = linked(self)
        return whole.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy the whole tensor."""
        return linked(self).__deepcopy__(memo)  # type: ignore[no-untyped-call]


def _free_after_this_stream(part: Tensor) -> None:
    """Have the memory of rows that were gathered not be used again before they are read.

    The script holds its tensor for as long as another stream than that of the copy needs it. The
    rows go as soon as they were gathered, and their memory to whatever that stream copies next.
    """
    if (module := module_of(part.device)) is not None:
        with suppress(NotImplementedError):  # a device without streams of its own memory
            part.record_stream(module.current_stream(part.device))


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
    """Return a plain tensor with all rows, without a graph if they had to be gathered."""
    return tensor.whole() if isinstance(tensor, LazyRows) else tensor


def linked(tensor: Tensor) -> Tensor:
    """Return a plain tensor with all rows, connected to the tensor's autograd graph."""
    if not isinstance(tensor, LazyRows):
        return tensor
    if tensor.requires_grad and torch.is_grad_enabled():
        apply: Any = _Linked.apply
        plain: Tensor = apply(tensor)
        return plain
    return tensor.whole()


def gather_for_functions(undo: ExitStack) -> None:
    """Pass tensors with all rows to the script's classes of `torch.autograd.Function`.

    They hand them to extensions in C++, which read memory and go by no operator of torch's.
    """
    function: Any = torch.autograd.Function
    patching.wrap(function, "apply", _with_all_rows, undo, Applying.RANKS)


def _with_all_rows(method: Any) -> Any:
    def original(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(None, cls)(*args, **kwargs)

    @functools.wraps(method.__get__(None, torch.autograd.Function))
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if _UNGATHERED and not cls.__module__.startswith(_WITH_OPERATORS):
            args, kwargs = map_tensors(args, linked), map_tensors(kwargs, linked)
        return original(cls, *args, **kwargs)

    for added in (original, apply):
        pass_over(added)
    return classmethod(apply)


def gather_lazily(
    part: Tensor, dim: int, order: Order | None = None, *, rows: Rows, meet: Callable[[], None]
) -> Tensor:
    """Return a `LazyRows` of this rank's rows; a plain gathered tensor if that doesn't pay.

    Args:
        part: This rank's rows.
        dim: The dimension of the batch.
        order: The memory order of the whole tensor, if it is known.
        rows: How they are distributed.
        meet: Checks that all ranks are at the same line.
    """
    block = part.size(dim) // rows.own
    small = part.numel() // rows.own * rows.count < row_operators.LARGE
    usual = type(part) is Tensor and part.layout is torch.strided
    if small or not usual or part.is_quantized or part.is_complex():
        return rows.gather(part, dim, order)
    sizes = [*part.shape]
    sizes[dim] = block * rows.count
    order = order or memory_order(part)
    like = torch.empty_strided(sizes, dense_strides(sizes, order), device="meta")
    back = sorted(order, key=order.__getitem__)
    dense = part.detach().permute(order).contiguous().permute(back)
    return LazyRows(dense, like, Placement(rows, dim, meet))


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
    # An in-place operator returns its argument, which has to be the script's own tensor again.
    return map_tensors(result, lambda tensor: wholes.get(id(tensor), tensor))


row_operators.bind(LazyRows)


# Moves only each rank's rows of a large batch to its device, until something needs all rows.
#
# Every rank has the whole batch on its host, and needs only its own rows on its device. The
# script gets a `LazyRows` from ``batch.to(device)``, which represents the whole batch. A split
# call uses the rows that are there; anything else has the ranks gather all rows. Lines of the
# script at which that happens more often than not move whole tensors from then on.


PATIENCE = 4  # tensors of a line that may be gathered before their share counts


class _MoveSite:
    """A line of the script that moves tensors of one kind.

    Attributes:
        moved: Number of tensors moved by rows.
        whole: How many of them were gathered after all.
    """

    moved = whole = 0

    @property
    def pays(self) -> bool:
        """True unless most tensors were gathered after all."""
        return self.whole < PATIENCE or 2 * self.whole <= self.moved


class Moves:
    """Wraps the methods by which the script moves tensors to a device.

    Args:
        ranks: All ranks.
        compiled: Knows what the script compiles itself: compiled code can't take `LazyRows`.
        meet: Checks that all ranks gather a tensor at the same line.
        counts: The receipt's counts.
    """

    def __init__(
        self,
        ranks: Ranks,
        compiled: UserCompile,
        meet: Callable[[], None],
        counts: Counter[str],
    ) -> None:
        self._ranks, self._compiled, self._meet, self._counts = ranks, compiled, meet, counts
        self._places: dict[Any, _MoveSite] = {}
        self._moving = False

    def install(self, undo: ExitStack) -> None:
        """Replace the methods that move a tensor."""
        for name in ("to", *LIKE_CUDA):
            if hasattr(Tensor, name):
                patching.wrap(Tensor, name, self._by_rows, undo)

    def _by_rows(self, original: Any) -> Any:
        @functools.wraps(original)
        def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            small = type(tensor) is not Tensor or tensor.numel() < row_operators.LARGE
            if small or self._moving:  # npu() calls to()
                return original(tensor, *args, **kwargs)
            frame = sys._getframe(1)
            move = functools.partial(_call, original, args, kwargs)
            self._moving = True
            try:
                return self.move(tensor, move, (frame.f_code, frame.f_lasti))
            finally:
                self._moving = False

        return method

    def move(self, tensor: Tensor, move: Callable[[Tensor], Tensor], where: Any) -> Tensor:
        """Return a moved tensor, or a `LazyRows` of it with this rank's rows.

        Args:
            tensor: A large tensor.
            move: Moves it, or a part of it.
            where: The line of the script.
        """
        if not self._may_move(tensor):
            return move(tensor)
        nothing = move(tensor.narrow(0, 0, 0))
        place = self._places.setdefault((where, tensor.shape[1:], nothing.dtype), _MoveSite())
        if not leaves_host(nothing) or not place.pays:
            return move(tensor)
        rows = Rows(self._ranks, tensor.size(0))
        part = move(rows.cut(tensor, 0))
        if not part.is_contiguous():
            return move(tensor)
        place.moved += 1
        self._counts["moved by rows"] += 1
        like = torch.empty(tensor.shape, device="meta")
        return LazyRows(part, like, Placement(rows, 0, functools.partial(self._use, place)))

    def _may_move(self, tensor: Tensor) -> bool:
        if not tensor.dim() or not tensor.is_cpu:
            return False
        plain = tensor.layout is torch.strided and not tensor.is_quantized
        if not plain or not tensor.is_contiguous() or tensor.is_complex() or tensor.requires_grad:
            return False
        ranks = self._ranks
        if not ranks.joined or tensor.size(0) < ranks.world_size or self._compiled.functions:
            return False
        functional = torch._C._functorch.peek_interpreter_stack() is not None
        return not functional and ranks.is_here()

    def _use(self, place: _MoveSite) -> None:
        place.whole += 1
        self._meet()


def _call(function: Any, args: Any, kwargs: Any, tensor: Tensor) -> Any:
    return function(tensor, *args, **kwargs)


def leaves_host(moved: Tensor) -> bool:
    """True if a tensor that was on the host is on a device."""
    return not moved.is_cpu
