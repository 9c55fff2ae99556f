"""Repairs faults of torch's compiler that silently give wrong results."""

from __future__ import annotations

import functools
import importlib
from contextlib import ExitStack, suppress
from typing import Any

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
    original = getattr(node_type, "recompute_size_and_body", None)
    if original is None:  # before torch 2.4
        return

    @functools.wraps(original)
    def recompute_size_and_body(node: Any, *args: Any, **kwargs: Any) -> None:
        original(node, *args, **kwargs)
        renames = getattr(node, "mutation_renames", None)
        if renames:
            node.set_read_writes(node.read_writes.rename(renames))

    undo.callback(setattr, node_type, "recompute_size_and_body", original)
    node_type.recompute_size_and_body = recompute_size_and_body


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
    undo.callback(setattr, variable, "is_supported_random_obj", variable.is_supported_random_obj)
    variable.is_supported_random_obj = staticmethod(lambda _: False)
