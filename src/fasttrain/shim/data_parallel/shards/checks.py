"""Checks that a script does with a sharded model only what shards allow."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import stateless

from fasttrain.shim.data_parallel.shards.low_gathers import unwatched
from fasttrain.shim.data_parallel.shards.refusals import (
    functional_error,
    name_of,
    parts_error,
    scripted_error,
    written_error,
)
from fasttrain.shim.hooks.roots import Root, is_sharded
from fasttrain.shim.process.refusal import refuse

_SWAPPING = {stateless._functional_call.__code__}  # torch.func.functional_call calls it, too


def check_own_parameters(root: Root) -> None:
    """Check that a module is called with its own parameters: only these are sharded.

    Raises:
        SystemExit: ``fsdp-functional``.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _SWAPPING:
            refuse(functional_error(root))
        frame = frame.f_back


def check_unsharded(root: Root, module: nn.Module) -> None:
    """Check that a module can be sharded, and no part of it has been, alone or with another root.

    Raises:
        SystemExit: ``fsdp-parts`` or ``fsdp-scripted``.
    """
    if isinstance(module, torch.jit.ScriptModule):
        refuse(scripted_error(root))
    if is_sharded(module):
        refuse(parts_error(root))


@contextmanager
def writes_refused(module: nn.Module) -> Iterator[None]:
    """Check that no call in the block writes into parameters, since they are freed after it.

    Raises:
        SystemExit: ``fsdp-writes``.
    """
    hooks = [(part._forward_hooks, _check_unwritten) for part in _sharded_in(module)]
    with _before_those_of_fsdp(hooks):
        yield


@contextmanager
def before_gathers(module: nn.Module, meet: Callable[[int], None]) -> Iterator[None]:
    """Call ``meet`` in the block before all ranks gather the parameters of a sharded part.

    Args:
        module: The module that is called.
        meet: Called with the part's number.
    """

    def meets(number: int) -> Callable[..., None]:
        return lambda *_: meet(number)

    hooks = [(m._forward_pre_hooks, meets(at)) for at, m in enumerate(_sharded_in(module))]
    with _before_those_of_fsdp(hooks):
        yield


def _sharded_in(module: nn.Module) -> list[nn.Module]:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return [m for m in nn.Module.modules(module) if fsdp and isinstance(m, fsdp.FSDPModule)]


@contextmanager
def _before_those_of_fsdp(hooks: Sequence[tuple[Any, Callable[..., None]]]) -> Iterator[None]:
    """Put hooks before FSDP's own, which gathers or frees, not registered: no script's hooks."""
    key: Any = object()
    for slot, hook in hooks:
        slot[key] = hook
        slot.move_to_end(key, last=False)
    try:
        yield
    finally:
        for slot, _ in hooks:
            slot.pop(key, None)


def _check_unwritten(part: nn.Module, *_: Any) -> None:
    fsdp: Any = sys.modules["torch.distributed.fsdp"]
    group: Any = fsdp.fully_shard.state(part)._fsdp_param_group
    with unwatched():
        for one in group.fsdp_params if group is not None else ():
            _check_rows(part, one)


def _check_rows(part: nn.Module, one: Any) -> None:
    shard = one.sharded_param
    whole = getattr(one._module_info.module, one._module_info.param_name).detach()
    rank, ranks = shard.device_mesh.get_local_rank(), shard.device_mesh.size()
    rows = whole.chunk(ranks) if whole.shape == shard.shape else ()
    kept = shard.detach().to_local().to(whole.dtype)
    same = rank >= len(rows) or torch.allclose(rows[rank], kept, 0.0, 0.0, equal_nan=True)
    if not same:
        refuse(written_error(name_of(part), one._module_info.param_name))
