"""Checks of who holds memory of the devices."""

from __future__ import annotations

from collections.abc import Iterator

from fasttrain.doctor.checks.words import check, named, size
from fasttrain.doctor.mend import end_orphans
from fasttrain.model.examination import DeviceProcess, DeviceState, Examination, Finding

# Of a device's memory, held by nobody that can be seen or for a display; below it a batch changes
# little, and so much the driver keeps for itself.
_LITTLE = 0.1


@check("orphans", "processes that dead fasttrain runs left behind", mend=end_orphans)
def _orphans(seen: Examination) -> Iterator[Finding]:
    on_devices = [item for state in seen.devices for item in state.processes if item.orphan]
    found = {process.pid: process for process in (*seen.host.orphans, *on_devices) if process.pid}
    if not found:
        return
    pids = sorted(found)
    runs = sorted({process.run for process in found.values()} - {""})
    held = sum(process.memory_bytes for process in on_devices)
    holding = f"{size(held)} of device memory is held" if held else "cores and ports are held"
    yield _orphans.finding(
        "warning",
        f"dead runs left {_processes(len(pids))} behind: {', '.join(map(str, pids))}",
        why=holding + (f" for {', '.join(runs)}" if runs else ""),
        fix=f"fasttrain doctor --fix, or kill {' '.join(map(str, pids))}",
    )


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"


@check("device-busy", "processes of others on the devices")
def _busy(seen: Examination) -> Iterator[Finding]:
    users: dict[tuple[DeviceProcess, ...], list[DeviceState]] = {}
    for state in seen.devices:
        others = _others(seen, state)
        if others:
            users.setdefault(tuple(map(_strip, others)), []).append(state)
    for processes, states in users.items():
        held = sum(p.memory_bytes for state in states for p in _others(seen, state))
        yield _busy.finding(
            "warning",
            f"{_where(seen, states)} in use by {_who(processes)}",
            why=(f"{size(held)} of memory is taken, and " if held else "memory is taken, and ")
            + "both slow each other down",
            fix="take idle devices with --gpus, or wait till they are done",
        )


def _others(seen: Examination, state: DeviceState) -> list[DeviceProcess]:
    """Return who is in the way of a run: those that compute, and a display that holds much."""
    alive = [process for process in state.processes if not process.orphan]
    drawn = sum(process.memory_bytes for process in alive if process.display)
    much = drawn > _total(seen, state) * _LITTLE > 0
    return [process for process in alive if much or not process.display]


def _total(seen: Examination, state: DeviceState) -> int:
    key = (state.kind, state.index, state.uuid)
    found = (d.memory_bytes for d in seen.machine.devices if (d.kind, d.index, d.uuid) == key)
    return next(found, 0)


def _where(seen: Examination, states: list[DeviceState]) -> str:
    """Return the devices' names; those of MIG instances alone are UUIDs."""
    instances = {device.uuid for device in seen.machine.devices if device.parent_uuid}
    uuids = [state.uuid for state in states]
    return ", ".join(uuids) if instances.issuperset(uuids) else named(states)


def _strip(process: DeviceProcess) -> DeviceProcess:
    # The ranks of one job differ in their memory; by this they are still one user of a device.
    return DeviceProcess(process.pid, command=process.command, run=process.run)


def _who(processes: tuple[DeviceProcess, ...]) -> str:
    hidden = sum(process.pid == 0 for process in processes)
    words = [_one(process) for process in processes if process.pid]
    if hidden:
        words.append(f"{_processes(hidden)} outside this container")
    return ", ".join(words)


def _one(process: DeviceProcess) -> str:
    of_run = f" of the run {process.run}" if process.run else ""
    return f"{process.command or 'a process of another user'} (pid {process.pid}){of_run}"


@check("device-memory", "device memory that no visible process holds")
def _memory(seen: Examination) -> Iterator[Finding]:
    for state in seen.devices:
        total, used = _total(seen, state), state.memory_used_bytes
        # NVIDIA's alone: an NPU's firmware holds some gigabytes, other boards share the host's.
        if state.kind != "cuda" or not total or not used:
            continue
        unseen = used - sum(process.memory_bytes for process in state.processes)
        computing = any(not process.display for process in state.processes)
        if computing or unseen <= total * _LITTLE:
            continue
        yield _memory.finding(
            "warning",
            f"{size(unseen)} of {named([state])} is in use, but by no process seen from here",
            why=f"{size(max(total - used, 0))} of {size(total)} is left for a run",
            fix="find who holds it outside this container: sudo fuser -v /dev/nvidia*",
        )


CHECKS = (_orphans, _busy, _memory)
