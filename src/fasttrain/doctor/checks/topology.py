"""Checks of what is connected: several devices, the networks of a cluster, and SLURM."""

from __future__ import annotations

from collections.abc import Iterator

from fasttrain.doctor.check import alike, check, is_on, named, one_line, present, visible
from fasttrain.model.machine import DeviceState, Examination, Finding, Partition, RdmaPort
from fasttrain.model.vendors import DeviceKind
from fasttrain.planning.describe import and_join, counted, device_names, kind_noun
from fasttrain.planning.visible import visible_slots

# Checks of several devices together: their models, order, and the links between them.


@check("mixed-devices", "whether all devices are of one model")
def _mixed(seen: Examination) -> Iterator[Finding]:
    for kind in present(seen):
        devices = [slot.device for slot in visible(seen, kind)]
        names = dict.fromkeys(device.name for device in devices)
        if len(names) < 2:
            continue
        yield _mixed.finding(
            "warning",
            f"the devices are not of one model: {device_names(devices)}",
            why="all ranks wait for the slowest, and use only what each of them can do",
            fix=f"use equal ones: --gpus {','.join(map(str, alike(devices)))}",
        )


@check("device-order", "whether CUDA counts mixed GPUs as nvidia-smi does")
def _order(seen: Examination) -> Iterator[Finding]:
    # Source: CUDA C++ Programming Guide 12.8, "CUDA Environment Variables": FASTEST_FIRST is the
    # default. For equal GPUs both orders are the same.
    names = {device.name for device in seen.machine.devices if device.kind == "cuda"}
    order = seen.environ.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    if len(names) > 1 and order != "PCI_BUS_ID":
        yield _order.finding(
            "hint",
            f"CUDA_DEVICE_ORDER is {order} on a machine with different GPUs",
            why="cuda:0 and numbers in CUDA_VISIBLE_DEVICES count from the fastest; --gpus counts"
            " as nvidia-smi",
            fix="export CUDA_DEVICE_ORDER=PCI_BUS_ID, for one way of counting",
        )


@check("mig", "whether MIG limits a run to one device")
def _mig(seen: Examination) -> Iterator[Finding]:
    slots = visible_slots(seen.machine, "cuda", seen.environ)
    instances = [slot for slot in slots if slot.device.parent_uuid]
    if instances and len(slots) > 1:
        yield _mig.finding(
            "hint",
            f"a process can use one of {kind_noun('cuda', len(slots))} and MIG instances",
            why="CUDA shows a process one MIG instance, and no whole GPU with it",
            fix=f"name one for each run: --gpus {instances[0].device.uuid}",
        )


@check("peer-access", "whether the GPUs can read each other's memory")
def _peers(seen: Examination) -> Iterator[Finding]:
    states = _states(seen, "cuda")
    apart = [state for state in states if state.peer_access is not None and _lacks(state, states)]
    if apart:
        yield _peers.finding(
            "hint",
            f"{named(apart)} can't read the memory of every other GPU",
            why="gradients are copied through the host's memory, which is slower",
            fix="on a server, turn ACS off in the BIOS and set the IOMMU to passthrough; many "
            "consumer boards don't support it",
        )


def _lacks(state: DeviceState, states: list[DeviceState]) -> bool:
    return bool({other.index for other in states} - {state.index} - set(state.peer_access or ()))


@check("links", "devices that reach others only across processor sockets")
def _links(seen: Examination) -> Iterator[Finding]:
    # SYS: over the link between NUMA nodes. Source: legend of `nvidia-smi topo -m`.
    for kind in present(seen):
        states = _states(seen, kind)
        indices = {str(state.index) for state in states}
        far = [
            state
            for state in states
            if {link for to, link in state.links.items() if to in indices} == {"SYS"}
        ]
        if far:
            yield _links.finding(
                "hint",
                f"{named(far)} reach{'es' if len(far) == 1 else ''} the others only across sockets",
                why="gradients cross the link between the processors, the slowest path",
                fix="nvidia-smi topo -m shows which devices are near each other; use those with "
                "--gpus",
            )


@check("numa", "devices on several NUMA nodes")
def _numa(seen: Examination) -> Iterator[Finding]:
    for kind in present(seen):
        nodes: dict[int, list[DeviceState]] = {}
        for state in _states(seen, kind):
            # Linux reports -1 if the firmware names no node.
            if state.numa_node is not None and state.numa_node >= 0:
                nodes.setdefault(state.numa_node, []).append(state)
        if len(nodes) > 1:
            where = (f"{named(states)} on node {node}" for node, states in sorted(nodes.items()))
            yield _numa.finding(
                "hint",
                f"the devices are on {len(nodes)} NUMA nodes: {and_join(where)}",
                why="a rank whose process runs on another node feeds its device more slowly",
                fix="for a run that needs only some of them, use those of one node, such as "
                f"--gpus {','.join(_visible_of(seen, kind, min(nodes.items())[1]))}",
            )


def _visible_of(seen: Examination, kind: DeviceKind, states: list[DeviceState]) -> Iterator[str]:
    indices = {state.index for state in states}
    for position, slot in enumerate(visible(seen, kind)):
        if slot.device.index in indices:
            yield str(position)


def _states(seen: Examination, kind: DeviceKind) -> list[DeviceState]:
    """Return the states of visible devices, without MIG instances."""
    indices = {s.device.index for s in visible(seen, kind) if not s.device.parent_uuid}
    return [state for state in seen.devices if state.kind == kind and state.index in indices]


_DEVICES = (_mixed, _order, _mig, _peers, _links, _numa)


# Checks of the cluster that this machine is in: its networks, and SLURM.


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


_CLUSTER = (_down, _slow, _partitions, _controller, _allocation)

CHECKS = (*_DEVICES, *_CLUSTER)
