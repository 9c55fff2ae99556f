"""Lets a script use shards where it has whole tensors: averages of weights, copies of models.

A script that knows nothing of shards mixes them with whole tensors, such as averaged weights that
it has copied before the model was sharded. torch ends this with an error. Every rank runs the same
line, so that the ranks can put the shard together, or cut the whole tensor as the shard is cut.
"""

from __future__ import annotations

import copy
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from fasttrain.shim.data_parallel.shards.whole_copies import COPIES, current, set_base
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.containers import map_tensors
from fasttrain.shim.hooks.roots import is_sharded

_OWN = ("fasttrain.", "torch.distributed.")  # modules of hooks that a copy is not to have
_MADE_BY = {"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"}
_DRAWN_LIKE = {"rand_like", "randn_like", "randint_like"}
# Parts of torch's messages where something can't be done with a DTensor, in torch 2.6 to 2.13
OF_SHARDS = (
    "mixed torch.Tensor and DTensor", "does not have a sharding strategy", "sharded dimension",
    "Sharding propagation failed", "unevenly sharded",
)  # fmt: skip
_IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__"}
# Functions that draw random numbers, and some that DTensor lacks or has wrong: in torch 2.13 amax
# has NaN for a derivative, a smooth loss that of one shard's mean, and cumsum(-1) sums each shard.
_WHOLE = {
    "amax", "amin", "aminmax", "bernoulli", "cummax", "cummin", "cumprod", "cumsum", "dropout",
    "huber_loss", "linalg_cond", "linalg_matrix_rank", "logcumsumexp", "median", "multinomial",
    "nonzero", "normal", "poisson", "prod", "quantile", "smooth_l1_loss", "trace", "trapezoid",
    "trapz",
}  # fmt: skip
# Functions that a rank without rows can't begin with, as others can with 0.
_OF_SOME = {
    "argmax", "argmin", "kthvalue", "linalg_matrix_norm", "linalg_norm", "linalg_vector_norm",
    "logsumexp", "max", "min", "mode", "norm", "std", "std_mean", "var", "var_mean",
}  # fmt: skip
# Functions in place that do the same to each number, or change no numbers. Any other may draw
# random numbers or use indices, for which DTensor draws by the shard or changes a copy.
_BY_NUMBER = {
    "abs_", "add_", "addcdiv_", "addcmul_", "ceil_", "clamp_", "clamp_max_", "clamp_min_", "clip_",
    "copy_", "detach_", "div_", "divide_", "erfinv_", "exp_", "fill_", "floor_", "lerp_", "log_",
    "masked_fill_", "mul_", "multiply_", "nan_to_num_", "neg_", "negative_", "pow_", "reciprocal_",
    "requires_grad_", "resize_", "resize_as_", "round_", "rsqrt_", "sigmoid_", "sign_",
    "sqrt_", "square_", "sub_", "subtract_", "tanh_", "true_divide_", "zero_",
}  # fmt: skip
# Functions that return views, of which DTensor makes copies where they cut the sharded dimension.
_VIEWS = {
    "__getitem__", "__iter__", "as_strided", "chunk", "diagonal", "dsplit", "expand", "expand_as",
    "flatten", "hsplit", "movedim", "moveaxis", "narrow", "permute", "ravel", "reshape",
    "reshape_as", "select", "split", "split_with_sizes", "squeeze", "swapaxes", "swapdims", "t",
    "tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "untyped_storage",
    "view", "view_as", "vsplit",
}  # fmt: skip
_VIEWED = {"H", "T", "imag", "mH", "mT", "real"}  # attributes that are views

# What FSDP knows of each shard, by the shard's id.
OWNERS: dict[int, weakref.ref[Any]] = {}


def install(undo: ExitStack) -> None:
    """Have functions of torch that get both shards and whole tensors do what is asked of them."""
    from torch.distributed.tensor import DTensor

    patching.put(DTensor, "__torch_function__", classmethod(_torch_function), undo)
    patching.wrap(nn.init, "orthogonal_", _begun_whole, undo)


def _begun_whole(original: Any) -> Any:
    """Have an initialization draw for the whole tensor: it transposes in place what it draws."""

    @functools.wraps(original)
    def begin(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_shard(tensor):
            return original(tensor, *args, **kwargs)
        with torch.no_grad():
            return _write(original, tensor, *args, **kwargs)

    return begin


def _torch_function(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Run a function of torch that gets a shard."""
    kwargs = kwargs or {}
    name = getattr(func, "__name__", "")
    if name == "__get__" and func.__self__.__name__ not in _VIEWED:
        # An attribute, of which an optimizer reads many in each step.
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        if COPIES:
            args, kwargs = current(args), current(kwargs)
            COPIES.settle(_tensors(args, kwargs))
        return _do(func, name, args, kwargs)


def _do(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "__deepcopy__":
        return _copied(*args)
    if name == "detach":
        return set_base(func(*args), args[0])
    if name == "data_ptr" and _is_shard(args[0]):  # by which scripts find tied parameters
        return _address(args[0])
    if name in _MADE_BY and (made := _made(name, args, kwargs)) is not None:
        return made
    if name in _DRAWN_LIKE:
        shard = args[0]
        empty = torch.empty(shard.shape, dtype=shard.dtype, device=shard.device)
        return _cut(func(empty, *args[1:], **kwargs), shard)
    if name == "__setitem__" and _is_shard(args[0]):
        _write(func, *args)
        return None
    return _run(func, name, args, kwargs)


def _run(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if getattr(func, "__module__", "") == "torch.nn.init":  # gets its tensor by name
        with torch.no_grad():
            return _write(func, kwargs.pop("tensor"), *args, **kwargs)
    if _is_shard(out := kwargs.get("out")):
        named = {key: value for key, value in kwargs.items() if value is not out}
        return _write(Tensor.copy_, out, func(*_put_together(args), **_whole_values(named)))
    first = args[0] if args else None
    if _needs_whole(name, args, kwargs) or isinstance(kwargs.get("out"), Tensor):
        return func(*_put_together(args), **_whole_values(kwargs))
    if _is_shard(first) and (name in _VIEWS or name == "__get__"):
        return _view(func, first, args, kwargs)
    if _is_shard(first) and _changes(name) and not _is_by_number(name):
        return _write(func, *args, **kwargs)
    return _run_mixed(func, name, args, kwargs)


def _run_mixed(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if args and name != "__set__" and _is_mixed(args, kwargs):
        several = _changes(name) and isinstance(args[0], list | tuple)
        if several and len(set(map(_is_shard, args[0]))) > 1:
            return _each(func, name, args, kwargs)
        given = args
        args, kwargs = _alike(name, args, kwargs)
        found = _run_alike(func, name, args, kwargs)
        if several:
            _give_back(name, given, args)
        return found
    return _run_alike(func, name, args, kwargs)


def _run_alike(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if not (COPIES and _changes(name)):
        return _or_whole(func, args, kwargs)
    of_lists = isinstance(args[0], list | tuple)  # such as of parameters and of their averages
    with COPIES.changing(list(_tensors(args if of_lists else args[:1], {}))):
        return _or_whole(func, args, kwargs)


def _or_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function on shards, or on whole tensors if torch can't do it on shards."""
    try:
        return func(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        if not any(words in str(error) for words in OF_SHARDS):
            raise
        shards = [t for t in _tensors(args, kwargs) if _is_shard(t)]
        if not all(map(_is_followed, shards)):
            raise
    name = getattr(func, "__name__", str(func))
    COPIES.tell(f"torch has no {name} for shards: it runs on whole tensors, on each rank")
    found = func(*map_tensors(args, _shared), **map_tensors(kwargs, _shared))
    COPIES.settle(shards)
    return found


def _shared(tensor: Any) -> Any:
    """Return the whole tensor of a shard, as `COPIES.share` does; others as they are."""
    if not _is_shard(tensor):
        return tensor
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return COPIES.share(tensor)
    apply: Any = _Whole.apply
    return apply(tensor)


def _is_by_number(name: str) -> bool:
    """True if a function in place can change a shard as it changes a whole tensor."""
    return name in _IN_PLACE or name in _BY_NUMBER or name.startswith("_")


def _give_back(name: str, given: Any, used: Any) -> None:
    """Copy into lists of tensors what a function has changed in those that took their places.

    A fused optimizer changes its states besides the parameters, and may get them whole.
    """
    for at in _changed_lists(name):
        for tensor, stand_in in zip(given[at], used[at], strict=False):
            if stand_in is tensor:
                continue
            if _is_shard(tensor):
                _write(Tensor.copy_, tensor, stand_in)
            else:
                tensor.copy_(stand_in.full_tensor())


@functools.cache
def _changed_lists(name: str) -> list[int]:
    """Return the places of the lists that a function of torch changes, but for the first."""
    operator: Any = getattr(torch.ops.aten, name, None)
    overloads = [getattr(operator, each) for each in operator.overloads()] if operator else []
    arguments = [each._schema.arguments for each in overloads]
    found = {at for of in arguments for at, one in enumerate(of) if _is_changed_list(one)}
    return sorted(found - {0})


def _is_changed_list(argument: Any) -> bool:
    changed = argument.alias_info is not None and argument.alias_info.is_write
    return changed and "List" in str(argument.type)


def _each(func: Any, name: str, args: Any, kwargs: Any) -> None:
    """Change a list of shards and whole tensors one by one."""
    for at in range(len(args[0])):
        # A list may be empty, such as of the states of an optimizer's variant.
        one = [value[at : at + 1] if isinstance(value, list | tuple) else value for value in args]
        _run_mixed(func, name, one, kwargs)


def _changes(name: str) -> bool:
    """True for a function that changes its first argument."""
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _view(func: Any, shard: Any, args: Any, kwargs: Any) -> Any:
    """Return what is a view of a shard's whole tensor."""
    if not _is_followed(shard):
        return func(*args, **kwargs)
    return func(_shared(shard), *map(_put_together, args[1:]), **_whole_values(kwargs))


class _Whole(torch.autograd.Function):
    """The whole tensor of a shard, whose gradient is cut as the shard is."""

    @staticmethod
    def forward(ctx: Any, shard: Any) -> Tensor:
        ctx.shard = shard.detach()
        return COPIES.share(shard)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _cut(gradient, ctx.shard)


def _write(func: Any, changed: Any, *args: Any, **kwargs: Any) -> Any:
    """Change a whole tensor in place, and keep the shard of it.

    Raises:
        RuntimeError: If autograd would have to know of it.
    """
    if torch.is_grad_enabled() and changed.requires_grad:
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation."
            if changed.is_leaf
            else "FSDP does not support derivatives of what is changed in place"
        )
    func(COPIES.share(changed), *map(_put_together, args), **_whole_values(kwargs))
    COPIES.settle([changed])
    return changed


def _is_shard(value: Any) -> bool:
    return hasattr(value, "placements")


def _address(shard: Any) -> int:
    """Return where a shard lies: that of one without rows, for which torch has 0, too."""
    local: Tensor = shard.detach().to_local()
    return local.untyped_storage().data_ptr() + int(local.storage_offset()) * local.element_size()


def _needs_whole(name: str, args: Any, kwargs: Any) -> bool:
    """True for a function that has to run on whole tensors."""
    if name in _WHOLE or (name in _OF_SOME and args and _lacks_rows(args[0])):
        return True
    # The derivative of a maximum is NaN on ranks that don't have it, and one without rows has none.
    given = (*args, *kwargs.values())
    return name.endswith("norm") and any(type(v) is float and math.isinf(v) for v in given)


def _lacks_rows(value: Any) -> bool:
    """True for a shard of which some ranks have no rows."""
    if not _is_shard(value):
        return False
    cuts = enumerate(value.placements)
    of = [(value.size(cut.dim), value.device_mesh.size(at)) for at, cut in cuts if cut.is_shard()]
    return any(math.ceil(rows / ranks) * (ranks - 1) >= rows for rows, ranks in of)


def _tensors(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments and in lists of them."""
    for value in (*args, *kwargs.values()):
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, Tensor):
                yield each


def _is_mixed(args: Any, kwargs: Any) -> bool:
    """True if some tensors are shards and others are whole.

    torch takes a whole scalar beside a shard that is none, such as in clipping.
    """
    found = list(_tensors(args, kwargs))
    shards, whole = [t for t in found if _is_shard(t)], [t for t in found if not _is_shard(t)]
    if not shards or not whole:
        return False
    if not all(map(_is_followed, shards)):
        return False
    return any(t.dim() for t in whole) or not any(t.dim() for t in shards)


def _is_followed(shard: Any) -> bool:
    """True if a shard may be put together: no gradient comes to it by that, or on the CPU.

    On a GPU FSDP adds to gradients in a stream of its own, which such a pass doesn't know.
    """
    return bool(shard.is_cpu or not shard.requires_grad or not torch.is_grad_enabled())


def _alike(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return arguments of one kind: that of what is changed in place, and else whole."""
    several = isinstance(args[0], list | tuple)
    first = args[0][0] if several else args[0]
    if _changes(name) and _is_shard(first):

        def cut(value: Any) -> Any:
            if several and isinstance(value, list | tuple):
                return [_cut(v, shard) for v, shard in zip(value, args[0], strict=False)]
            return _cut(value, first)

        return tuple(map(cut, args)), {key: cut(value) for key, value in kwargs.items()}
    return tuple(map(_put_together, args)), _whole_values(kwargs)


def _put_together(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)([_put_together(each) for each in value])
    return value.full_tensor() if _is_shard(value) else value


def _whole_values(named: dict[str, Any]) -> dict[str, Any]:
    return {name: _put_together(value) for name, value in named.items()}


def _cut(value: Any, like: Any) -> Any:
    """Return a whole tensor as a shard is cut; one that is broadcast stays whole on each rank."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    if not isinstance(value, Tensor) or _is_shard(value) or not value.dim():
        return value
    value = value.to(like.device)
    if value.shape != like.shape:
        mesh = like.device_mesh
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    with torch.no_grad():
        return distribute_tensor(value.detach(), like.device_mesh, like.placements)


def _made(name: str, args: Any, kwargs: Any) -> Any:
    """Return a new tensor with a shard's type and device; None if it has the shard's shape.

    Such as a state that begins with zeros: only one of the shard's shape is to be used with it.
    """
    shard = args[0]
    made: Any = getattr(shard.to_local().detach(), name)(*args[1:], **kwargs)
    return None if made.shape == shard.shape else made


def _copied(shard: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of a shard: a whole tensor, which nobody shards again by itself."""
    if id(shard) not in memo:
        whole = shard.detach().full_tensor().clone()
        parameter = isinstance(shard, nn.Parameter)
        made = nn.Parameter(whole, shard.requires_grad) if parameter else whole
        memo[id(shard)] = made if parameter else whole.requires_grad_(shard.requires_grad)
    return memo[id(shard)]


def let_copy(module: nn.Module) -> None:
    """Let a module of a class that FSDP has derived be copied by `copy.deepcopy`."""
    from torch.distributed.fsdp import FSDPModule

    kind: Any = type(module)
    if isinstance(module, FSDPModule) and not hasattr(kind.__bases__[-1], "__deepcopy__"):
        kind.__deepcopy__ = _whole_copy


def _whole_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a copy with whole parameters, of the class that the script has given the module."""
    for hook in _own_hooks(module):
        memo[id(hook)] = hook
    kind: Any = type(module).__bases__[-1]
    copied: nn.Module = kind.__new__(kind)
    memo[id(module)] = copied
    state = module.__getstate__()  # type: ignore[no-untyped-call]
    own = {key: value for key, value in state.items() if "__composable_api" not in key}
    copied.__setstate__(copy.deepcopy(own, memo))  # type: ignore[no-untyped-call]
    for table in _tables(copied):
        for key in [key for key, hook in table.items() if _is_own(hook)]:
            del table[key]
    return copied


def whole_modules(value: Any) -> Any:
    """Return a value with copies of sharded modules in it that are whole, to be saved."""
    if isinstance(value, nn.Module):
        return copy.deepcopy(value) if is_sharded(value) else value
    if type(value) is dict:
        return {key: whole_modules(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)([whole_modules(each) for each in value])
    return value


def _tables(module: nn.Module) -> list[dict[Any, Any]]:
    parts = nn.Module.modules(module)
    return [of for part in parts for name, of in vars(part).items() if name.endswith("_hooks")]


def _own_hooks(module: nn.Module) -> list[Any]:
    return [hook for table in _tables(module) for hook in table.values() if _is_own(hook)]


def _is_own(hook: Any) -> bool:
    """True for a hook of FSDP's or fasttrain's; torch wraps some, and some are partials."""
    inner = getattr(hook, "hook", hook)
    function: Callable[..., Any] = getattr(inner, "func", inner)
    return str(getattr(function, "__module__", "")).startswith(_OWN)
