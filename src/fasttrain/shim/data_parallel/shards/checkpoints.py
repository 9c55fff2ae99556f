"""Whole tensors in checkpoints of sharded models and of their optimizers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fasttrain.shim.data_parallel.shards.whole_copies import COPIES, LentTensor, current
from fasttrain.shim.hooks.containers import map_tensors
from fasttrain.shim.hooks.device_clock import module_of

_LAYOUT = ("shape", "device", "device_mesh", "placements")
_KEPT_FREE = 0.1  # share of a device's memory that whole tensors of a checkpoint leave free


def keep_states_whole(tell: Callable[[str], None], optimizer: Optimizer) -> None:
    """Have an optimizer save and load the whole states of shards, as in one process."""
    ref = weakref.ref(optimizer)

    def gather(_: Optimizer, checkpoint: dict[str, Any]) -> dict[str, Any]:
        # By a key that is no parameter there may be anything, such as a count of steps.
        whole = functools.partial(_for_checkpoint, tell=tell)
        states = {key: map_tensors(state, whole) for key, state in checkpoint["state"].items()}
        return {**checkpoint, "state": states}

    def cut(_: Optimizer, checkpoint: dict[str, Any]) -> dict[str, Any]:
        owner: Any = ref()
        ours = [p for group in owner.param_groups for p in group["params"]]
        theirs = [p for group in checkpoint["param_groups"] for p in group["params"]]
        shards = dict(zip(theirs, ours, strict=False))
        states = {
            key: map_tensors(state, functools.partial(_taken_by, shards[key]))
            if key in shards
            else state
            for key, state in checkpoint["state"].items()
        }
        return {**checkpoint, "state": states}

    optimizer.register_state_dict_post_hook(gather)
    optimizer.register_load_state_dict_pre_hook(cut)


def _taken_by(parameter: Any, value: Tensor) -> Any:
    """Return a tensor of a checkpoint as the optimizer of a parameter takes it.

    What `state_dict()` has lent is taken itself and not copied, as in one process: the checkpoint
    and both optimizers, if there are two, go on sharing its memory.
    """
    if not isinstance(value, LentTensor):
        return cut_like(value, parameter)
    shard = value.of.shard
    if any(getattr(parameter, name, None) != getattr(shard, name) for name in _LAYOUT):
        return cut_like(value, parameter)
    COPIES.settle([shard])
    return shard


def gather_parameters(
    tell: Callable[[str], None], module: nn.Module, checkpoint: dict[str, Any], prefix: str, _: Any
) -> None:
    """Put whole tensors into a module's ``state_dict()``: a hook after it."""
    for name in module._parameters:
        if prefix + name in checkpoint:
            checkpoint[prefix + name] = _for_checkpoint(checkpoint[prefix + name], tell)


def cut_parameters(module: nn.Module, checkpoint: dict[str, Any], prefix: str, *_: Any) -> None:
    """Put shards into what a module's ``load_state_dict()`` loads: a hook before it."""
    for name, shard in module._parameters.items():
        if prefix + name in checkpoint and shard is not None:
            checkpoint[prefix + name] = cut_like(checkpoint[prefix + name], shard)


def _for_checkpoint(value: Any, tell: Callable[[str], None]) -> Any:
    """Return a whole tensor; on the CPU where its device is nearly full.

    A whole model beside its shards may be more than the device holds.
    """
    if not hasattr(value, "full_tensor"):
        return value
    memory: Any = getattr(module_of(value.device), "mem_get_info", None)
    if memory is not None:
        free, total = memory(value.device)
        if free <= _KEPT_FREE * total:
            tell(
                "the whole tensors of a state_dict() are on the CPU, since its device was nearly"
                " full"
            )
            return whole_of(value).cpu()
    return COPIES.lend(value)


def whole_of(value: Any) -> Any:
    """Return a sharded tensor as a whole one: a collective, so that every rank must call it."""
    COPIES.settle([value])
    gather = getattr(value, "full_tensor", None)
    return current(value) if gather is None else gather()


def cut_like(value: Any, like: Any) -> Any:
    """Return this rank's shard of a tensor that has the parameter's shape; other values as is."""
    if not isinstance(value, Tensor) or hasattr(value, "placements"):
        return value
    if value.shape != like.shape or not hasattr(like, "placements"):
        return value
    from torch.distributed.tensor import distribute_tensor

    with torch.no_grad():
        return distribute_tensor(value.detach().to(like.device), like.device_mesh, like.placements)
