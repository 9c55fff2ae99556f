"""Checks of SLURM: what there is, and what a job was given."""

from __future__ import annotations

from collections.abc import Iterator

from fasttrain.doctor.checks.words import check, one_line
from fasttrain.model.examination import Examination, Finding, Partition
from fasttrain.planning.describe import counted


@check("slurm", "the partitions of a SLURM cluster")
def _partitions(seen: Examination) -> Iterator[Finding]:
    cluster = seen.cluster
    if cluster.partitions and not cluster.job:
        listed = "; ".join(_partition(partition) for partition in cluster.partitions)
        yield _partitions.finding(
            "hint",
            f"SLURM {cluster.version} is here: {listed}",
            why="what is started directly runs on this machine alone, outside of its queue",
            fix="run on its nodes from a job: sbatch or srun",
        )


def _partition(partition: Partition) -> str:
    default = " (default)" if partition.default else ""
    nodes = f"{partition.nodes_up} of {counted(partition.nodes, 'node')} up"
    gpus = f", {counted(partition.gpus_per_node, 'GPU')} each" if partition.gpus_per_node else ""
    return f"{partition.name}{default} {nodes}{gpus}"


@check("slurm-controller", "whether SLURM's controller answers")
def _controller(seen: Examination) -> Iterator[Finding]:
    if not seen.cluster.configured:
        if not seen.cluster.job:
            return  # the package alone, on a machine of no cluster
        yield _controller.finding(
            "hint",
            "SLURM's tools are installed, but find no configuration of a cluster",
            why=f"this is job {seen.cluster.job}, but no other can be sent from here",
            fix="use a login shell (bash -l), or set SLURM_CONF",
        )
    elif seen.cluster.error:
        yield _controller.finding(
            "warning",
            f"SLURM doesn't answer: {one_line(seen.cluster.error)}",
            why="no job can be sent to it from here",
            fix="scontrol ping tells which controller is down; ask who runs the cluster",
        )


@check("slurm-allocation", "whether the job was given every device of the node")
def _allocation(seen: Examination) -> Iterator[Finding]:
    # SLURM tells a job of its GPUs only; a job on NPUs names none.
    gpus = {d.index for d in seen.machine.devices if d.kind in ("cuda", "rocm")}
    job, given = seen.cluster.job, len(seen.cluster.job_gpus)
    if job and given < len(gpus):
        yield _allocation.finding(
            "hint",
            f"job {job} was given {given or 'none'} of the {counted(len(gpus), 'GPU')} here",
            why="the others may be given to other jobs at any time, though they are in sight",
            fix=f"ask for them: --gpus-per-node={len(gpus)}, or --exclusive",
        )


CHECKS = (_partitions, _controller, _allocation)
