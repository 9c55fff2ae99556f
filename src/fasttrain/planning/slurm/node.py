"""Gives each node of a job the settings that `fasttrain run` would be called with there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fasttrain.model.decision import Setting
from fasttrain.model.job import Allocation
from fasttrain.model.settings import Settings
from fasttrain.model.slurm import SlurmSettings
from fasttrain.planning.describe import SLURM


def node_settings(
    settings: Settings, slurm: SlurmSettings, allocation: Allocation, port: int
) -> Settings:
    """Return the settings of one node, with what SLURM decided in them.

    Args:
        settings: What the user wants of the run.
        slurm: What the user wants of SLURM.
        allocation: The place of this task.
        port: Port on the first node at which the ranks meet.
    """
    changes: dict[str, Any] = {"nodes": Setting(str(len(allocation.hosts)), SLURM)}
    if len(allocation.hosts) > 1:
        changes |= {
            "node_rank": Setting(allocation.node_rank, SLURM),
            "master_addr": Setting(allocation.hosts[0], SLURM),
            "master_port": Setting(port, SLURM),
        }
    if slurm.gpus_per_node.value and settings.device.value != "cpu":
        changes["gpus"] = Setting("all", slurm.gpus_per_node.source)
    if settings.python.value:  # it runs this already
        changes["python"] = Setting(None, SLURM)
    return replace(settings, **changes)
