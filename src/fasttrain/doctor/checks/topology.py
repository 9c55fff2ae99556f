"""Checks of several devices together: their models, order, and the links between them."""

from __future__ import annotations

from collections.abc import Iterator

from fasttrain.doctor.check import check
from fasttrain.doctor.checks.words import alike, named, present, visible
from fasttrain.model.examination import DeviceState, Examination, Finding
from fasttrain.model.vendors import DeviceKind
from fasttrain.planning.describe import and_join, device_names, kind_noun
from fasttrain.planning.visible import visible_slots


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
            "warning",
            f"CUDA_DEVICE_ORDER is {order} on a machine with different GPUs",
            why="CUDA's GPU 0 is then the fastest; nvidia-smi and --gpus count in another order",
            fix="export CUDA_DEVICE_ORDER=PCI_BUS_ID",
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


CHECKS = (_mixed, _order, _mig, _peers, _links, _numa)
