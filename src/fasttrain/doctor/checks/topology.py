"""Checks of how several devices belong together."""

from __future__ import annotations

from collections.abc import Iterator

from fasttrain.doctor.checks.words import alike, check, named, present, visible
from fasttrain.model.examination import DeviceState, Examination, Finding
from fasttrain.model.vendors import DeviceKind
from fasttrain.planning.describe import and_join, device_names, kind_noun
from fasttrain.planning.visible import visible_slots


@check("mixed-devices", "whether the devices of one job are of one model")
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
            fix=f"take equal ones: --gpus {','.join(map(str, alike(devices)))}",
        )


@check("device-order", "whether CUDA counts mixed GPUs as nvidia-smi does")
def _order(seen: Examination) -> Iterator[Finding]:
    # Source: CUDA C++ Programming Guide 12.8, "CUDA Environment Variables": FASTEST_FIRST is the
    # default, so for equal GPUs the order is the same.
    names = {device.name for device in seen.machine.devices if device.kind == "cuda"}
    order = seen.environ.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    if len(names) > 1 and order != "PCI_BUS_ID":
        yield _order.finding(
            "warning",
            f"CUDA_DEVICE_ORDER is {order} on a machine with unlike GPUs",
            why="GPU 0 is then the fastest for CUDA, and another one for nvidia-smi and --gpus",
            fix="export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )


@check("mig", "whether MIG instances keep a run from using several")
def _mig(seen: Examination) -> Iterator[Finding]:
    slots = visible_slots(seen.machine, "cuda", seen.environ)
    instances = [slot for slot in slots if slot.device.parent_uuid]
    if instances and len(slots) > 1:
        yield _mig.finding(
            "hint",
            f"of {kind_noun('cuda', len(slots))} and MIG instances a process can use one",
            why="CUDA shows a process one MIG instance, and hides every whole GPU beside it",
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
            why="gradients take the way through the host's memory, which is slower",
            fix="on a server turn ACS off in the BIOS and the IOMMU to passthrough; many "
            "consumer boards can't do it",
        )


def _lacks(state: DeviceState, states: list[DeviceState]) -> bool:
    return bool({other.index for other in states} - {state.index} - set(state.peer_access or ()))


@check("links", "devices that reach the others across processor sockets only")
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
                why="gradients cross the link between the processors, the slowest way there is",
                fix="nvidia-smi topo -m shows which devices are near each other; take those with "
                "--gpus",
            )


@check("numa", "devices that hang on several NUMA nodes")
def _numa(seen: Examination) -> Iterator[Finding]:
    for kind in present(seen):
        nodes: dict[int, list[DeviceState]] = {}
        for state in _states(seen, kind):
            # Linux says -1 where the firmware names no node.
            if state.numa_node is not None and state.numa_node >= 0:
                nodes.setdefault(state.numa_node, []).append(state)
        if len(nodes) > 1:
            where = (f"{named(states)} on node {node}" for node, states in sorted(nodes.items()))
            yield _numa.finding(
                "hint",
                f"the devices hang on {len(nodes)} NUMA nodes: {and_join(where)}",
                why="a rank whose process runs on the other node feeds its device more slowly",
                fix="a run that needs only some of them is best off with those of one node, as "
                f"with --gpus {','.join(_visible_of(seen, kind, min(nodes.items())[1]))}",
            )


def _visible_of(seen: Examination, kind: DeviceKind, states: list[DeviceState]) -> Iterator[str]:
    indices = {state.index for state in states}
    for position, slot in enumerate(visible(seen, kind)):
        if slot.device.index in indices:
            yield str(position)


def _states(seen: Examination, kind: DeviceKind) -> list[DeviceState]:
    """Return the states of the whole devices that a run would see."""
    indices = {s.device.index for s in visible(seen, kind) if not s.device.parent_uuid}
    return [state for state in seen.devices if state.kind == kind and state.index in indices]


CHECKS = (_mixed, _order, _mig, _peers, _links, _numa)
