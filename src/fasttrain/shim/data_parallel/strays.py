"""Stops ranks that would train unrelated copies of one model over each other."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fasttrain.model.errors import FasttrainError
from fasttrain.model.plan import LaunchPlan
from fasttrain.shim.process.refusal import refuse


def refuse_unrelated_copies(plan: LaunchPlan, undo: ExitStack) -> None:
    """Check at the first optimizer step of a rank that the script joined a process group."""
    if plan.processes.value.backend == "direct" or plan.levers.strategy.value.mode != "script":
        return
    world_size = int(os.environ["WORLD_SIZE"])  # of torchrun; an elastic run is not always whole
    if world_size == 1:
        return

    checked = False

    def check(*_: Any) -> None:
        # It stays in place: torch is reading the hooks, and raises when one of them goes.
        nonlocal checked
        if checked:
            return
        checked = True
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            refuse(_unrelated(world_size))

    undo.callback(register_optimizer_step_pre_hook(check).remove)


def _unrelated(world_size: int) -> FasttrainError:
    return FasttrainError(
        f"{world_size} processes were about to train {world_size} unrelated models",
        why="the script made an optimizer step without joining a process group",
        fix="use --strategy ddp to make them one, or the option by which the script joins a process"
        " group; --strategy none runs the copies on purpose",
        slug="unrelated-copies",
    )
