"""Checks of the cluster that this machine is in: its networks, and SLURM."""

from __future__ import annotations

from collections.abc import Iterator

from fasttrain.doctor.check import check
from fasttrain.doctor.checks.words import is_on, one_line, present
from fasttrain.model.examination import Examination, Finding, Partition, RdmaPort
from fasttrain.planning.describe import and_join, counted


def _ports(seen: Examination) -> tuple[RdmaPort, ...]:
    """Return the ports that a run on several nodes would use; none without devices."""
    wanted = present(seen) and not is_on(seen, "NCCL_IB_DISABLE")
    return tuple(port for port in seen.host.rdma_ports if port.state) if wanted else ()


@check("rdma-port", "whether the ports of InfiniBand and RoCE adapters are up")
def _down(seen: Examination) -> Iterator[Finding]:
    ports = _ports(seen)
    down = [port for port in ports if port.state != "ACTIVE"]
    if not down:
        return
    names = and_join(f"{port.name} ({port.state})" for port in down)
    # Source: NCCL 2.26, src/transport/net_ib.cc: ports in another state are skipped.
    nothing = len(down) == len(ports)
    # INIT: the link is up, and the port waits for an address from the subnet manager.
    waits = any(port.state == "INIT" and port.link_layer == "InfiniBand" for port in down)
    yield _down.finding(
        "warning" if nothing else "hint",
        f"no InfiniBand or RoCE port is up: {names}"
        if nothing
        else f"{len(down)} of {counted(len(ports), 'InfiniBand or RoCE port')} "
        f"{'is' if len(down) == 1 else 'are'} not up: {names}",
        why="a run on several nodes averages its gradients over TCP, which is slower"
        if nothing
        else "a run on several nodes doesn't use it, which is fine if it is not meant to",
        fix="check that a subnet manager runs (sminfo), and ask who runs the network"
        if waits
        else "check its cable and the switch: rdma link, ibstat",
    )


@check("rdma-rate", "InfiniBand ports that are slower than the others")
def _slow(seen: Examination) -> Iterator[Finding]:
    # Ethernet ports are left out: those of one machine often serve different networks.
    ports = [p for p in _ports(seen) if p.link_layer == "InfiniBand" and p.state == "ACTIVE"]
    best = max((port.rate_gbps or 0 for port in ports), default=0)
    slow = [port for port in ports if port.rate_gbps and port.rate_gbps < best]
    if slow:
        names = and_join(f"{port.name} ({port.rate_gbps:g} Gbit/s)" for port in slow)
        yield _slow.finding(
            "hint",
            f"slower than the other InfiniBand ports, at {best:g} Gbit/s: {names}",
            why="devices near it reach other nodes more slowly, and the others wait",
            fix="check its cable and the switch's port: iblinkinfo, ibstat",
        )


@check("slurm", "the partitions of a SLURM cluster")
def _partitions(seen: Examination) -> Iterator[Finding]:
    cluster = seen.cluster
    if cluster.partitions and not cluster.job:
        listed = "; ".join(_partition(partition) for partition in cluster.partitions)
        yield _partitions.finding(
            "hint",
            f"SLURM {cluster.version} is here: {listed}",
            why="a run that is started directly uses this machine only, outside of the queue",
            fix="start a job on its nodes with sbatch or srun",
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
            return  # the package is installed, but the machine is in no cluster
        yield _controller.finding(
            "hint",
            "SLURM's tools are installed, but find no cluster configuration",
            why=f"this is job {seen.cluster.job}, but no other job can be submitted from here",
            fix="use a login shell (bash -l), or set SLURM_CONF",
        )
    elif seen.cluster.error:
        yield _controller.finding(
            "warning",
            f"SLURM doesn't answer: {one_line(seen.cluster.error)}",
            why="no job can be submitted from here",
            fix="scontrol ping shows which controller is down; ask who runs the cluster",
        )


@check("slurm-allocation", "whether the job was given every device of the node")
def _allocation(seen: Examination) -> Iterator[Finding]:
    # SLURM lists only GPUs in a job's variables, so NPUs can't be compared.
    gpus = {d.index for d in seen.machine.devices if d.kind in ("cuda", "rocm")}
    job, given = seen.cluster.job, len(seen.cluster.job_gpus)
    if job and given < len(gpus):
        yield _allocation.finding(
            "hint",
            f"job {job} was given {given or 'none'} of the {counted(len(gpus), 'GPU')} here",
            why="the others are visible, but SLURM may give them to other jobs at any time",
            fix=f"ask for them: --gpus-per-node={len(gpus)}, or --exclusive",
        )


CHECKS = (_down, _slow, _partitions, _controller, _allocation)
