"""Repairs faults of torch's compiler that silently give wrong results."""

from __future__ import annotations

import importlib
from contextlib import ExitStack, suppress
from typing import Any

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.seams import then

# Part of the keys of torch's compile caches, so that nothing compiled without the repairs is used.
CACHE_TAG = "fasttrain-repairs-1"


def repair(undo: ExitStack) -> None:
    """Install the repairs that the present torch needs."""
    _keep_order_of_mutations(undo)
    _draw_each_time(undo)
    with suppress(ImportError):  # torch 2.7
        config: Any = importlib.import_module("torch.compiler.config")
        undo.callback(setattr, config, "cache_key_tag", config.cache_key_tag)
        config.cache_key_tag = f"{config.cache_key_tag}{CACHE_TAG}"


def _keep_order_of_mutations(undo: ExitStack) -> None:
    """Keep a kernel that reads a scattered buffer after the scatter.

    Fusion on the CPU lost this order, and the gradient of relu and max_pool2d after a convolution
    was 0: pytorch#185509. Can go once no supported torch lacks pytorch#185873, as 2.13 does.
    """
    node_type: Any = importlib.import_module("torch._inductor.scheduler").SchedulerNode
    if hasattr(node_type, "recompute_size_and_body"):  # from torch 2.4 on
        make = then(_rename_mutations, even_traced=True)
        patching.wrap(node_type, "recompute_size_and_body", make, undo)


def _rename_mutations(node: Any) -> None:
    renames = getattr(node, "mutation_renames", None)
    if renames:
        node.set_read_writes(node.read_writes.rename(renames))


def _draw_each_time(undo: ExitStack) -> None:
    """Break the graph where a `random.Random` of the script draws numbers.

    Dynamo draws while it traces, so that all later calls of the graph get the same numbers: torch
    2.13, ``torch/_dynamo/variables/misc.py``. The functions of the module `random` are not
    concerned.
    """
    misc: Any = importlib.import_module("torch._dynamo.variables.misc")
    variable = getattr(misc, "RandomVariable", None)
    if variable is None:  # before torch 2.5
        return
    patching.put(variable, "is_supported_random_obj", staticmethod(lambda _: False), undo)
