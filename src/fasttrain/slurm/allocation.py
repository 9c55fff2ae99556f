"""Reads what SLURM tells a task about its place, and cleans the environment that it came with."""

from __future__ import annotations

from collections.abc import Mapping

from submitit.slurm.slurm import SlurmJobEnvironment

from fasttrain.model.hang import PULSES_VARIABLE
from fasttrain.model.job import SECRETS_VARIABLE, Allocation

# sbatch passes the submitting shell's environment on. What is left there of another launcher
# would tell the script a rank that it doesn't have.
STRAY = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "FASTTRAIN_RUN_ID",
    "FASTTRAIN_RESTART_COUNT", PULSES_VARIABLE, SECRETS_VARIABLE, "SUBMITIT_EXECUTOR",
    "SUBMITIT_FOLDER", "SUBMITIT_PREEMPT_SIGNAL",
)  # fmt: skip


def read_allocation(environ: Mapping[str, str]) -> Allocation:
    """Return the place of this task; to be called in a task that srun started.

    Source: srun(1), SLURM 22.05, "OUTPUT ENVIRONMENT VARIABLES".
    """
    place = SlurmJobEnvironment()
    granted = environ.get("SLURM_GPUS_ON_NODE", "")
    return Allocation(
        job_id=place.job_id,
        hosts=tuple(place.hostnames),
        node_rank=place.node,
        task=place.global_rank,
        local_task=place.local_rank,
        tasks=place.num_tasks,
        gpus=int(granted) if granted.isdecimal() else 0,
        restarts=int(environ.get("SLURM_RESTART_COUNT", "0")),
    )


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what other launchers, and this one, have left in it."""
    return {name: value for name, value in environ.items() if name not in STRAY}


def rank_variables(place: Allocation, port: int) -> dict[str, str]:
    """Return the variables by which torch finds its rank, for a task that is one worker.

    Source: the documentation of torchrun, torch 2.13, "Environment Variables".
    """
    per_node = place.tasks // len(place.hosts)
    return {
        "RANK": str(place.task),
        "LOCAL_RANK": str(place.local_task),
        "GROUP_RANK": str(place.node_rank),
        "WORLD_SIZE": str(place.tasks),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_WORLD_SIZE": str(len(place.hosts)),
        "MASTER_ADDR": place.hosts[0],
        "MASTER_PORT": str(port),
    }
