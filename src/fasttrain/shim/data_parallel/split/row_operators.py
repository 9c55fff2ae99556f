"""Rules for operators that can be computed from a rank's rows of a large tensor, below autograd.

Each rule returns its operator's result for the whole tensors: again a tensor of rows, a view, or a
number that is summed over the ranks. If the arguments don't fit, the rule returns NotImplemented,
and the operator is computed from all rows.

Source: ``aten/src/ATen/native/native_functions.yaml`` of torch 2.13, for the arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Rule = Callable[[Any, Any, Any], Any]
RULES: dict[Any, Rule] = {}
LARGE = 1 << 20  # elements of a whole tensor from which it pays not to gather it
_NONE, _MEAN, _SUM = 0, 1, 2  # torch's numbers of reductions
_SHAPES: dict[Any, Any] = {}  # cached: computing a result's shape takes longer than many operators
_MOST_SHAPES = 4096
_aten: Any = torch.ops.aten
_Lazy: Any = None  # the class LazyRows, set by `bind`: it and the rules need each other


def bind(lazy: Any) -> None:
    """Set the class of the tensors that the rules are for."""
    global _Lazy  # noqa: PLW0603 - each needs the other
    _Lazy = lazy


def _rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators by name, as far as this torch has them."""

    def register(rule: Rule) -> Rule:
        for name in names:
            packet, _, overload = name.partition(".")
            found = getattr(getattr(_aten, packet, None), overload or "default", None)
            if found is not None:
                RULES[found] = rule
        return rule

    return register


def _first(values: Iterable[Any]) -> Any:
    """Return the first `LazyRows` that isn't gathered; None if there is none."""
    lazies = (v for v in values if isinstance(v, _Lazy))
    return next((v for v in lazies if v.scaled_part[0] is not None), None)


def _shape_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Return an operator's result for the whole tensors as a meta tensor."""
    key = (func, *map(_key, args), *((name, _key(value)) for name, value in kwargs.items()))
    found = _SHAPES.get(key)
    if found is None:
        if len(_SHAPES) >= _MOST_SHAPES:
            _SHAPES.clear()
        found = _SHAPES[key] = _computed_shape(func, args, kwargs)
    return found


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.size(), value.stride(), value.dtype
    return tuple(value) if isinstance(value, list) else value


def _computed_shape(func: Any, args: Any, kwargs: Any) -> Any:
    def empty(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(
                value.size(), value.stride(), dtype=value.dtype, device="meta"
            )
        return value

    kwargs = {key: empty(value) for key, value in kwargs.items() if key != "device"}
    return func(*map(empty, args), **kwargs)


def _rows(part: Tensor, whole: Tensor, dim: int, lazy: Any, scale: int = 1) -> Tensor:
    """Return a result with rows: as a `LazyRows` if it is large, else gathered."""
    placement = lazy.placement
    moved = type(placement)(placement.rows, dim, placement.meet)
    made: Tensor = _Lazy(part, whole, moved, scale=scale)
    return made if whole.numel() >= LARGE else made.whole()  # type: ignore[attr-defined]


# --- elementwise


@_rule(
    "_to_copy", "clone", "neg", "exp", "log", "abs", "sigmoid", "tanh", "relu", "sigmoid_backward",
    "tanh_backward", "threshold_backward", "zeros_like", "ones_like", "logical_not", "where.self",
    "masked_fill.Scalar", "isnan", "isinf", "sgn", "sign",
    *(f"{name}.{kind}" for name in ("add", "sub", "mul", "div", "eq", "ne", "gt", "ge", "lt", "le")
      for kind in ("Tensor", "Scalar")),
    "pow.Tensor_Scalar",
)  # fmt: skip
def _elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    lazy = _first(args)
    if lazy is None or (kwargs.get("device") or lazy.device) != lazy.device:
        return NotImplemented
    dim = lazy.placement.dim - lazy.dim()  # negative
    parts = [_part_of(value, dim, lazy) for value in args]
    if any(part is NotImplemented for part in parts):
        return NotImplemented
    whole = _shape_of(func, args, kwargs)
    if whole.dim() < -dim or whole.size(dim) != lazy.size(dim):
        return NotImplemented
    return _rows(func(*parts, **kwargs), whole, whole.dim() + dim, lazy)


def _part_of(value: Any, dim: int, lazy: Any) -> Any:
    """Return the rows of an argument of an elementwise operator.

    Args:
        value: The argument.
        dim: The batch dimension, counted from the last one (negative).
        lazy: The tensor whose rows they have to match.
    """
    if not isinstance(value, Tensor):
        return value
    rows = lazy.placement.rows
    if value.dim() < -dim or value.size(dim) == 1:
        return value.whole() if isinstance(value, _Lazy) else value
    if value.size(dim) != lazy.size(dim):
        return NotImplemented
    return rows.cut(value, value.dim() + dim)


# --- along other dimensions than the batch


@_rule("_softmax", "_log_softmax")
def _along(func: Any, args: Any, kwargs: Any) -> Any:
    lazy, dim, *others = args
    if _first(args) is None or dim % lazy.dim() == lazy.placement.dim:
        return NotImplemented
    whole = _shape_of(func, args, kwargs)
    return _rows(func(lazy.part, dim, *others, **kwargs), whole, lazy.placement.dim, lazy)


@_rule("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(func: Any, args: Any, kwargs: Any) -> Any:
    gradient, output, dim, dtype = args
    lazy = _first(args)
    if lazy is None or dim % lazy.dim() == lazy.placement.dim or gradient.shape != output.shape:
        return NotImplemented
    rows, batch = lazy.placement.rows, lazy.placement.dim
    scale = _scale(gradient)
    part = func(rows.cut(gradient, batch, scale), rows.cut(output, batch), dim, dtype, **kwargs)
    return _rows(part, _shape_of(func, args, kwargs), batch, lazy, scale)


@_rule("argmax", "argmin", "max.dim", "min.dim", "logsumexp", "sum.dim_IntList", "mean.dim")
def _reduced(func: Any, args: Any, kwargs: Any) -> Any:
    lazy, dims, keep = (*args, False, False)[:3] if len(args) > 1 else (*args, None, False)
    keep = kwargs.get("keepdim", keep)
    if _first(args) is None or dims is None or dims == []:
        return NotImplemented
    over = {d % lazy.dim() for d in ([dims] if isinstance(dims, int) else dims)}
    batch = lazy.placement.dim
    if batch in over:
        return NotImplemented
    parts, wholes = func(lazy.part, *args[1:], **kwargs), _shape_of(func, args, kwargs)
    to = batch if keep else batch - sum(d < batch for d in over)
    if isinstance(parts, Tensor):
        return _rows(parts, wholes, to, lazy)
    return tuple(_rows(part, whole, to, lazy) for part, whole in zip(parts, wholes, strict=True))


@_rule("topk")
def _topk(func: Any, args: Any, kwargs: Any) -> Any:
    lazy, dim = args[0], args[2] if len(args) > 2 else kwargs.get("dim", -1)
    if _first(args) is None or dim % lazy.dim() == lazy.placement.dim:
        return NotImplemented
    parts, wholes = func(lazy.part, *args[1:], **kwargs), _shape_of(func, args, kwargs)
    batch = lazy.placement.dim
    return tuple(_rows(part, whole, batch, lazy) for part, whole in zip(parts, wholes, strict=True))


# --- views


def _scale(gradient: Tensor) -> int:
    """Return the scale that a gradient's rows have already."""
    return gradient.scaled_part[1] if isinstance(gradient, _Lazy) else 1


def _view(lazy: Any, part: Tensor, dim: int, func: Any, args: Any, kwargs: Any) -> Any:
    placement = type(lazy.placement)(lazy.placement.rows, dim, lazy.placement.meet)
    replay = lambda whole: func(whole, *args[1:], **kwargs)  # noqa: E731 - used once
    whole = _shape_of(func, args, kwargs)
    return _Lazy(part, whole, placement, lazy, replay, _scale(lazy))


@_rule("detach", "alias")
def _same(func: Any, args: Any, kwargs: Any) -> Any:
    (lazy,) = args
    part, _ = lazy.scaled_part
    if part is None:
        return NotImplemented
    return _view(lazy, func(part), lazy.placement.dim, func, args, kwargs)


@_rule("view", "_unsafe_view")
def _viewed(func: Any, args: Any, kwargs: Any) -> Any:
    lazy, sizes = args
    # The rows are consecutive, also in any shape whose first dimension they fill. The part may lie
    # otherwise in memory than the whole, whose view is possible.
    part, scale = lazy.scaled_part
    if part is None or math.prod(lazy.shape[: lazy.placement.dim]) != 1:
        return NotImplemented
    rows = lazy.placement.rows
    whole = _shape_of(func, args, kwargs)
    dim = next((at for at, size in enumerate(whole.shape) if size != 1), None)
    if dim is None or whole.size(dim) % rows.count:
        return NotImplemented
    sizes = [*whole.shape]
    sizes[dim] = sizes[dim] // rows.count * rows.own
    if func is _aten._unsafe_view.default:
        return _rows(part.reshape(sizes), whole, dim, lazy, scale)
    return _view(lazy, part.reshape(sizes), dim, func, args, kwargs)


@_rule("slice.Tensor", "select.int", "unsqueeze", "squeeze.dim")
def _along_one(func: Any, args: Any, kwargs: Any) -> Any:
    lazy, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    own, _ = lazy.scaled_part
    if own is None or lazy.size(lazy.placement.dim) == 1:
        return NotImplemented
    unsqueezes = func is _aten.unsqueeze.default
    dim %= lazy.dim() + unsqueezes
    batch = lazy.placement.dim
    if dim == batch and not unsqueezes:
        return NotImplemented
    part = func(own, *args[1:], **kwargs)
    if unsqueezes:
        batch += dim <= batch
    elif part.dim() < lazy.dim():
        batch -= dim < batch
    return _view(lazy, part, batch, func, args, kwargs)


@_rule("transpose.int", "permute", "t")
def _permuted(func: Any, args: Any, kwargs: Any) -> Any:
    lazy = args[0]
    part, _ = lazy.scaled_part
    if part is None:
        return NotImplemented
    n = lazy.dim()
    order = list(range(n))
    if func is _aten.permute.default:
        order = [dim % n for dim in args[1]]
    elif n > 1:
        one, other = (0, 1) if func is _aten.t.default else (dim % n for dim in args[1:])
        order[one], order[other] = other, one
    batch = order.index(lazy.placement.dim)
    return _view(lazy, func(part, *args[1:], **kwargs), batch, func, args, kwargs)


@_rule("slice_backward", "select_backward")
def _view_backward(func: Any, args: Any, kwargs: Any) -> Any:
    lazy, sizes, dim, *others = args
    own, scale = lazy.scaled_part
    if own is None:
        return NotImplemented
    dim %= len(sizes)
    batch = lazy.placement.dim
    if func is _aten.select_backward.default:
        batch += dim <= batch
    elif dim == batch:
        return NotImplemented
    rows = lazy.placement.rows
    part_sizes = [*sizes]
    part_sizes[batch] = sizes[batch] // rows.count * rows.own
    part = func(own, part_sizes, dim, *others, **kwargs)
    return _rows(part, _shape_of(func, args, kwargs), batch, lazy, scale)


# --- reductions over all rows


def _total(parts: Tensor, lazy: Any) -> Tensor:
    """Sum over the ranks, in at least fp32."""
    lazy.placement.meet()
    wide = parts.float() if parts.dtype in (torch.float16, torch.bfloat16) else parts
    total: Tensor = lazy.placement.rows.ranks.sum(wide)
    return total.to(parts.dtype)


@_rule("sum", "mean")
def _over_all(func: Any, args: Any, kwargs: Any) -> Any:
    (lazy,) = args
    if lazy.part is None or not lazy.is_floating_point():
        return NotImplemented
    total = _total(_aten.sum.default(lazy.part, **kwargs), lazy)
    return total / lazy.numel() if func is _aten.mean.default else total


@_rule("nll_loss_forward", "nll_loss2d_forward")
def _nll(func: Any, args: Any, kwargs: Any) -> Any:
    scores, target, weight, reduction, ignored = args
    if _first((scores,)) is None or scores.dim() < 2 or scores.placement.dim:
        return NotImplemented
    own = scores.placement.rows.cut(target, 0)
    if reduction == _NONE:
        part, none = func(scores.part, own, weight, reduction, ignored, **kwargs)
        return _rows(part, _shape_of(func, args, kwargs)[0], 0, scores), none
    loss, by = _total(torch.stack(func(scores.part, own, weight, _SUM, ignored, **kwargs)), scores)
    return (loss / by if reduction == _MEAN else loss), by.clone()


@_rule("nll_loss_backward", "nll_loss2d_backward")
def _nll_backward(func: Any, args: Any, kwargs: Any) -> Any:
    gradient, scores, target, weight, reduction, ignored, by = args
    if _first((scores,)) is None or scores.dim() < 2 or scores.placement.dim:
        return NotImplemented
    rows = scores.placement.rows
    if gradient.dim():
        gradient = rows.cut(gradient, 0)
    own = rows.cut(target, 0)
    scale = rows.ranks.world_size
    part = func(gradient * scale, scores.part, own, weight, reduction, ignored, by, **kwargs)
    return _rows(part, _shape_of(_aten.empty_like.default, (scores,), {}), 0, scores, scale)


@_rule("mse_loss", "binary_cross_entropy_with_logits")
def _pairs(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute a loss of pairs of elements, whose tensors have one shape or broadcast."""
    places = 2 if func is _aten.mse_loss.default else 4
    given, reduction = args[:places], args[places] if len(args) > places else _MEAN
    lazy = _first(given)
    if lazy is None or kwargs or reduction == _NONE:
        return NotImplemented
    dim = lazy.placement.dim - lazy.dim()
    parts = [_part_of(value, dim, lazy) for value in given]
    whole = _shape_of(func, (*given, *[None] * (places - len(given)), _NONE), {})
    fits = whole.shape == lazy.shape
    if not fits or any(part is NotImplemented for part in parts):
        return NotImplemented
    total = _total(func(*parts, *[None] * (places - len(given)), _SUM), lazy)
    return total / lazy.numel() if reduction == _MEAN else total


@_rule("mse_loss_backward")
def _mse_backward(func: Any, args: Any, kwargs: Any) -> Any:
    gradient, *given, reduction = args
    lazy = _first(given)
    if lazy is None or reduction == _NONE or given[0].shape != given[1].shape:
        return NotImplemented
    batch = lazy.placement.dim
    parts = [lazy.placement.rows.cut(tensor, batch) for tensor in given]
    if gradient.dim():  # for a second derivative: one gradient per element
        gradient = lazy.placement.rows.cut(gradient.expand(lazy.shape), batch)
    by = lazy.numel() if reduction == _MEAN else 1
    scale = lazy.placement.rows.ranks.world_size
    part = func(gradient * (scale / by), *parts, _SUM, **kwargs)
    return _rows(part, _shape_of(_aten.empty_like.default, (lazy,), {}), batch, lazy, scale)


# --- memory


@_rule("record_stream")
def _recorded(func: Any, args: Any, kwargs: Any) -> Any:
    """Record on the rank's rows that another stream uses them, for which none are gathered."""
    lazy, *others = args
    part = lazy.scaled_part[0]
    return NotImplemented if part is None else func(part, *others, **kwargs)
