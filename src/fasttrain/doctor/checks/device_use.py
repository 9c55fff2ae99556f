"""Checks of the processes on devices; and the fix for one, which ends workers of dead runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from fasttrain.doctor.check import check
from fasttrain.doctor.checks.words import named
from fasttrain.hardware.runs import find_run_processes, run_of
from fasttrain.model.errors import size
from fasttrain.model.examination import DeviceProcess, DeviceState, Examination, Finding
from fasttrain.planning.describe import counted
from fasttrain.processes import ending
from fasttrain.processes.table import alive, look_up

# Share of a device's memory that a display or an unseen process may hold without a finding: it
# barely changes the largest batch, and a driver reserves about as much for itself.
_LITTLE = 0.1
NOTHING_LEFT = "no worker of a dead run is left"
GRACE_S = 5.0  # between SIGTERM and SIGKILL


def end_orphans(_seen: Examination) -> str:
    """End the workers of runs whose launcher is dead, and return what was done, in one line.

    Only workers are ended: the user may have left other processes of the script, such as
    TensorBoard, running on purpose.
    """
    # Searched again: since the examination, a pid may have been given to another process.
    runs = find_run_processes(Path())
    orphans = [pid for pid, run in runs.items() if run.orphan and _is_worker(pid)]
    workers = [process for pid in orphans if (process := look_up(pid))]
    done = ending.end(lambda: alive(workers), GRACE_S)
    ended = ""
    if done.ended:
        names = ending.named(done.ended)
        ended = f"ended {counted(len(done.ended), 'worker')} of dead runs: {names}"
    stuck = f"could not end {ending.named(done.left)}" if done.left else ""
    return "; ".join(part for part in (ended, stuck) if part) or NOTHING_LEFT


def _is_worker(pid: int) -> bool:
    """True if a process is a worker, which has a plan on its command line."""
    with suppress(psutil.Error):
        return bool(run_of(psutil.Process(pid).cmdline(), {}, Path()))
    return False


@check("orphans", "processes that dead fasttrain runs left running", mend=end_orphans)
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
        f"dead runs left {_processes(len(pids))} running: {', '.join(map(str, pids))}",
        why=holding + (f" for {', '.join(runs)}" if runs else ""),
        fix=f"fasttrain doctor --fix, or kill {' '.join(map(str, pids))}",
    )


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"


@check("device-busy", "other processes that use the devices")
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
            fix="use idle devices with --gpus, or wait until they are done",
        )


def _others(seen: Examination, state: DeviceState) -> list[DeviceProcess]:
    """Return processes that compute, and a display's if it holds much memory."""
    alive = [process for process in state.processes if not process.orphan]
    drawn = sum(process.memory_bytes for process in alive if process.display)
    much = drawn > _total(seen, state) * _LITTLE > 0
    return [process for process in alive if much or not process.display]


def _total(seen: Examination, state: DeviceState) -> int:
    key = (state.kind, state.index, state.uuid)
    found = (d.memory_bytes for d in seen.machine.devices if (d.kind, d.index, d.uuid) == key)
    return next(found, 0)


def _where(seen: Examination, states: list[DeviceState]) -> str:
    """Return the devices' names: UUIDs if all of them are MIG instances, which share an index."""
    instances = {device.uuid for device in seen.machine.devices if device.parent_uuid}
    uuids = [state.uuid for state in states]
    return ", ".join(uuids) if instances.issuperset(uuids) else named(states)


def _strip(process: DeviceProcess) -> DeviceProcess:
    # Without the memory, which differs between ranks, one job on eight devices is one finding.
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
        # Only NVIDIA's: an NPU's firmware holds some gigabytes, other GPUs may share the host's.
        if state.kind != "cuda" or not total or not used:
            continue
        unseen = used - sum(process.memory_bytes for process in state.processes)
        computing = any(not process.display for process in state.processes)
        if computing or unseen <= total * _LITTLE:
            continue
        yield _memory.finding(
            "warning",
            f"{size(unseen)} of {named([state])} is in use, but by no process visible here",
            why=f"{size(max(total - used, 0))} of {size(total)} is left for a run",
            fix="find who holds it outside this container: sudo fuser -v /dev/nvidia*",
        )


CHECKS = (_orphans, _busy, _memory)
