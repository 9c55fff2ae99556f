"""Lets a script use shards where it has whole tensors: averages of weights, copies of models.

A script that knows nothing of shards mixes them with whole tensors, such as averaged weights that
it has copied before the model was sharded. torch ends this with an error. Every rank runs the same
line, so that the ranks can put the shard together, or cut the whole tensor as the shard is cut.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.roots import is_sharded

_OWN = ("fasttrain.", "torch.distributed.")  # modules of hooks that a copy is not to have
_MADE_BY = {"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"}
_DRAWN_LIKE = {"rand_like", "randn_like", "randint_like"}
_IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__"}


def install(undo: ExitStack) -> None:
    """Have functions of torch that get both shards and whole tensors do what is asked of them."""
    from torch.distributed.tensor import DTensor

    patching.put(DTensor, "__torch_function__", classmethod(_torch_function), undo)


def _torch_function(_: Any, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Run a function of torch that gets a shard."""
    kwargs = kwargs or {}
    name = getattr(func, "__name__", "")
    with torch._C.DisableTorchFunctionSubclass():
        if name == "__deepcopy__":
            return _copied(*args)
        if name in _MADE_BY and (made := _made(name, args, kwargs)) is not None:
            return made
        if name in _DRAWN_LIKE:
            shard = args[0]
            empty = torch.empty(shard.shape, dtype=shard.dtype, device=shard.device)
            return _cut(func(empty, *args[1:], **kwargs), shard)
        if name == "__setitem__" and _is_shard(args[0]):
            return _set_items(*args)
        if args and name != "__set__" and not kwargs.get("out") and _is_mixed(args, kwargs):
            args, kwargs = _alike(name, args, kwargs)
        return func(*args, **kwargs)


def _is_shard(value: Any) -> bool:
    return hasattr(value, "placements")


def _tensors(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments; of a list, which are of one kind, the first."""
    for value in (*args, *kwargs.values()):
        head = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(head, Tensor):
            yield head


def _is_mixed(args: Any, kwargs: Any) -> bool:
    """True if some tensors are shards and others are whole.

    torch takes a whole scalar beside a shard that is none, such as in clipping.
    """
    found = list(_tensors(args, kwargs))
    shards, whole = [t for t in found if _is_shard(t)], [t for t in found if not _is_shard(t)]
    if not shards or not whole:
        return False
    if torch.is_grad_enabled() and any(t.requires_grad and not t.is_cpu for t in shards):
        # FSDP adds to gradients in a stream of its own, which a pass by another way doesn't know.
        return False
    return any(t.dim() for t in whole) or not any(t.dim() for t in shards)


def _alike(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return arguments of one kind: that of what is changed in place, and else whole."""
    changes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    several = isinstance(args[0], list | tuple)
    first = args[0][0] if several else args[0]
    if changes and _is_shard(first):

        def cut(value: Any) -> Any:
            if several and isinstance(value, list | tuple):
                return [_cut(v, shard) for v, shard in zip(value, args[0], strict=False)]
            return _cut(value, first)

        return tuple(map(cut, args)), {key: cut(value) for key, value in kwargs.items()}
    return tuple(map(_put_together, args)), {k: _put_together(v) for k, v in kwargs.items()}


def _put_together(value: Any) -> Any:
    if isinstance(value, list | tuple) and value and _is_shard(value[0]):
        return type(value)([_put_together(each) for each in value])
    return value.full_tensor() if _is_shard(value) else value


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


def _set_items(shard: Any, where: Any, value: Any) -> None:
    """Set items of a whole tensor, and keep the shard of it."""
    whole = shard.detach().full_tensor().clone()
    whole[_put_together(where)] = _put_together(value)
    shard.detach().copy_(_cut(whole, shard))


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
    kind: Any = type(module)
    if not hasattr(kind.__bases__[-1], "__deepcopy__"):
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
