"""Hooks of the script's on modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torchs
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from fasttrain.shim.data_parallel.split.registrations import (
    ALL_MODULES,
    HookCount,
    Marks,
    foreign_hook,
)


def look(*_: Any) -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    "name",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
     "register_full_backward_pre_hook"],
)  # fmt: skip
@pytest.mark.parametrize("hook", [look, functools.partial(look, 1)])
def test_hooks_of_the_script(name: str, hook: Callable[..., Any]) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert foreign_hook(module) == ""
    handle = getattr(module[1], name)(hook)
    assert foreign_hook(module) == "ReLU"
    handle.remove()
    assert foreign_hook(module) == ""


def test_hooks_on_all_modules() -> None:
    handle = torchs.register_module_forward_hook(look)
    try:
        assert foreign_hook(nn.Linear(1, 1)) == ALL_MODULES
    finally:
        handle.remove()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchs_own_hooks_compute_the_same_for_all_rows() -> None:
    module = nn.Sequential(
        weight_norm(nn.Linear(2, 2)), spectral_norm(nn.Linear(2, 2)),
        parametrizations.orthogonal(nn.Linear(2, 2)), nn.Linear(2, 2),
    )  # fmt: skip
    prune.l1_unstructured(module[3], "weight", 1)
    module(torch.ones(1, 2))
    assert foreign_hook(module) == ""


def test_what_is_registered_is_counted_until_it_is_undone() -> None:
    count = HookCount()
    register = nn.Module.register_forward_hook
    with ExitStack() as undo:
        count.install(undo)
        module = nn.Linear(1, 1)
        made = count.registered.count
        assert made > 0, "parameters"
        module.register_forward_hook(look)
        assert count.registered.count == made + 1
    nn.Linear(1, 1).register_forward_hook(look)
    assert count.registered.count == made + 1
    assert nn.Module.register_forward_hook is register


def since(count: HookCount, module: nn.Module, change: Callable[[], Any]) -> bool:
    """Return whether a change registers something on a module's parts."""
    before, kept = count.registered.count, change()
    found = count.registered.any_since(before, nn.Module.modules(module))
    del kept
    return found


def test_what_is_registered_on_other_modules_is_nothing_to_a_root() -> None:
    count, other, layers = HookCount(), nn.Linear(1, 1), nn.ModuleList([nn.Linear(2, 2)])
    module = nn.Sequential(nn.ReLU(), layers)
    with ExitStack() as undo:
        count.install(undo)
        assert not since(count, module, lambda: nn.Linear(2, 2))
        assert not since(count, module, lambda: layers[:])
        assert not since(count, module, lambda: other.register_forward_hook(look))
        assert not since(count, module, lambda: setattr(other, "weight", nn.Parameter()))
        assert not since(count, module, lambda: None)


def test_what_is_registered_on_a_part_of_a_root_is_seen() -> None:
    count, layers = HookCount(), nn.ModuleList([nn.Linear(2, 2)])
    module = nn.Sequential(nn.ReLU(), layers)
    with ExitStack() as undo:
        count.install(undo)
        assert since(count, module, lambda: module[0].register_forward_hook(look))
        assert since(count, module, lambda: layers.append(nn.Linear(2, 2)))
        assert since(count, module, lambda: layers[1].register_forward_pre_hook(look))
        assert since(count, module, lambda: setattr(layers[0], "weight", nn.Parameter()))
        assert since(count, module, lambda: module.__setitem__(0, nn.Identity()))
        assert not since(count, module, lambda: setattr(module[0], "attribute", 1))


def test_modules_that_are_dropped_are_forgotten() -> None:
    marks = Marks()
    for _ in range(3):
        marks.note(nn.Identity())
    assert marks.count == 3
    assert not marks._last


def test_modules_that_are_moved_or_cast_are_counted() -> None:
    count = HookCount()
    module = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    with ExitStack() as undo:
        count.install(undo)
        module.to("cpu").float()
        assert count.moved == 0
        module[2].double()
        assert count.moved == 1
        module.float()
        assert count.moved == 2
    module.double()
    assert count.moved == 2


def test_parameters_that_fsdp_exchanges_in_each_call_are_none_of_the_scripts() -> None:
    layer, count = nn.LSTM(2, 2), HookCount()
    shard: Any = nn.Parameter(torch.zeros(4, 2))
    shard.placements = ()
    with ExitStack() as undo:
        count.install(undo)
        for parameter in (shard, nn.Parameter(torch.zeros(8, 2)), shard):
            layer.weight_hh_l0 = parameter
        assert count.registered.count == 0
        layer.bias_hh_l0 = nn.Parameter(torch.zeros(8))
        assert count.registered.count == 1
