"""Checks of devices: their state and links, and the processes that use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import psutil

from fasttrain.doctor.check import check, named
from fasttrain.hardware.runs import find_run_processes, run_of
from fasttrain.model.errors import size
from fasttrain.model.machine import DeviceProcess, DeviceState, Examination, Finding
from fasttrain.model.vendors import DeviceKind
from fasttrain.planning.describe import counted
from fasttrain.processes import table
from fasttrain.processes.table import alive, look_up

# Checks of the state of devices: errors, clocks, power, and PCIe links.


T = TypeVar("T")

# Xids that a faulty program usually causes: a bad index, an illegal access, an aborted process.
# Source: docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors with the Xid Catalog", 2026.
_XIDS_OF_PROGRAMS = frozenset({13, 31, 43, 45})


@dataclass(frozen=True, slots=True)
class _Group(Generic[T]):
    """Devices of one kind with the same reading."""

    reading: T
    states: tuple[DeviceState, ...]

    @property
    def kind(self) -> DeviceKind:
        return self.states[0].kind

    def __str__(self) -> str:
        return named(self.states)

    def command(self, options: str, otherwise: str) -> str:
        """Return an nvidia-smi command for these devices; `otherwise` for another vendor's."""
        if self.kind != "cuda":
            return otherwise
        ids = ",".join(str(index) for index in sorted({state.index for state in self.states}))
        return f"sudo nvidia-smi -i {ids} {options}"


def _groups(seen: Examination, read: Callable[[DeviceState], T | None]) -> Iterator[_Group[T]]:
    """Yield devices grouped by what `read` returns; those with nothing to report are left out.

    One fact about eight devices is then one finding, not eight.
    """
    found: dict[tuple[DeviceKind, T], list[DeviceState]] = {}
    for state in seen.devices:
        if reading := read(state):
            found.setdefault((state.kind, reading), []).append(state)
    for (_, reading), states in found.items():
        yield _Group(reading, tuple(states))


@check("device-health", "whether the driver calls every device healthy")
def _health(seen: Examination) -> Iterator[Finding]:
    for group in _groups(seen, lambda state: "" if state.health == "OK" else state.health):
        yield _health.finding(
            "warning" if group.reading == "Warning" else "error",
            f"the driver reports {group} as {group.reading}",
            why="a run on it may fail or compute wrong results",
            fix="look the fault up with the vendor's tool; until it is repaired, leave the device "
            "out with --gpus",
        )


@check("ecc-errors", "uncorrected memory errors")
def _ecc(seen: Examination) -> Iterator[Finding]:
    for group in _groups(seen, lambda state: state.ecc_uncorrected):
        each = ", each," if len(group.states) > 1 else ""
        yield _ecc.finding(
            "error",
            f"{counted(group.reading, 'uncorrected memory error')} on {group}{each} since the "
            "driver was loaded",
            why="data was lost; a run that uses that memory fails or computes wrong results",
            fix=group.command("--gpu-reset", "restart the machine")
            + " while nothing runs on it; if the errors return, have the board replaced",
        )


@check("row-remap", "faulty memory rows that could not be remapped")
def _rows(seen: Examination) -> Iterator[Finding]:
    for group in _groups(seen, lambda state: state.rows_failed):
        yield _rows.finding(
            "error",
            f"a faulty memory row could not be remapped on {group}",
            # Source: docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt, "RMA Policy Thresholds for
            # Row-Remapping"; NVML reports failures of the past as well.
            why="its spare rows are used up, so memory errors will return",
            fix="leave it out with --gpus, and have the board replaced",
        )


@check("xid", "errors that the kernel logged for the GPUs")
def _xids(seen: Examination) -> Iterator[Finding]:
    for group in _groups(seen, lambda state: tuple(sorted(set(state.xids)))):
        numbers = ", ".join(map(str, group.reading))
        of_programs = set(group.reading) <= _XIDS_OF_PROGRAMS
        yield _xids.finding(
            "hint" if of_programs else "warning",
            f"the kernel logged Xid {numbers} for {group}",
            why="usually caused by a program, in the past"
            if of_programs
            else "errors of the hardware, the driver or a link",
            fix="look the numbers up in docs.nvidia.com/deploy/xid-errors; sudo dmesg | grep Xid "
            "shows when, and in which process",
        )


@check("throttling", "clocks that are throttled now")
def _throttling(seen: Examination) -> Iterator[Finding]:
    for group in _groups(seen, lambda state: state.throttled):
        # Under load every large board reaches its power limit; heat and faults are not normal.
        by_power = set(group.reading) == {"power"}
        yield _throttling.finding(
            "hint" if by_power else "warning",
            f"the clocks of {group} are throttled by: {', '.join(group.reading)}",
            why="a run is slower while this lasts",
            fix=_throttling_fix(group.kind, by_power=by_power),
        )


def _throttling_fix(kind: DeviceKind, *, by_power: bool) -> str:
    fix = "compare the power limits" if by_power else "check fans, airflow and power supply"
    shown = "POWER" if by_power else "PERFORMANCE,TEMPERATURE"
    return f"{fix}: nvidia-smi -q -d {shown}" if kind == "cuda" else fix


@check("power-limit", "power limits below the board's default")
def _power(seen: Examination) -> Iterator[Finding]:
    for group in _groups(seen, _lowered_power):
        limit, default = group.reading
        yield _power.finding(
            "warning",
            f"the power limit of {group} is {limit} W; the board's default is {default} W",
            why="the clocks drop when a run needs more power",
            fix=group.command(f"-pl {default}", "set it back with the vendor's tool"),
        )


def _lowered_power(state: DeviceState) -> tuple[int, int] | None:
    if state.power_limit_w is None or state.power_default_w is None:
        return None
    # In whole watts, because drivers round the two values differently.
    limit, default = round(state.power_limit_w), round(state.power_default_w)
    return (limit, default) if limit < default else None


@check("clock-limit", "clocks limited below the board's maximum")
def _clocks(seen: Examination) -> Iterator[Finding]:
    for group in _groups(seen, _lowered_clock):
        limit, highest = group.reading
        yield _clocks.finding(
            "hint",
            f"the clocks of {group} are limited to {limit} MHz; the board reaches {highest} MHz",
            why="a run can't use the board's full speed",
            fix=group.command("-rac", "set them back with the vendor's tool")
            + ", unless the maker of the machine set them on purpose",
        )


def _lowered_clock(state: DeviceState) -> tuple[int, int] | None:
    limit, highest = state.clock_limit_mhz, state.clock_max_mhz
    return (limit, highest) if limit and highest and limit < highest else None


@check("persistence", "whether the driver stays loaded between runs")
def _persistence(seen: Examination) -> Iterator[Finding]:
    if seen.machine.system != "Linux":
        return
    for group in _groups(seen, lambda state: state.persistence is False):
        yield _persistence.finding(
            "hint",
            f"persistence mode is off on {group}",
            why="the driver shuts an idle GPU down, and every start waits until it is up again",
            fix="sudo systemctl enable --now nvidia-persistenced, or "
            + group.command("-pm 1", "the vendor's own service"),
        )


@check("pcie-width", "PCIe links with fewer lanes than possible")
def _pcie_width(seen: Examination) -> Iterator[Finding]:
    for group in _groups(seen, lambda state: _below(state.pcie_width, state.pcie_width_max)):
        lanes, highest = group.reading
        yield _pcie_width.finding(
            "warning",
            f"the PCIe link of {group} runs on {lanes} of {highest} lanes",
            why="copies of batches and gradients take longer",
            fix="use a slot with all lanes, and check that board and riser are seated well",
        )


@check("pcie-generation", "PCIe links at a lower generation than possible")
def _pcie_generation(seen: Examination) -> Iterator[Finding]:
    for group in _groups(seen, lambda state: _below(state.pcie_gen, state.pcie_gen_max)):
        generation, highest = group.reading
        yield _pcie_generation.finding(
            "hint",
            f"the PCIe link of {group} runs at generation {generation} of {highest}",
            why="each generation has half the bandwidth of the next",
            fix="check the slot's setting in the BIOS, and that board and riser are seated well",
        )


def _below(now: int | None, highest: int | None) -> tuple[int, int] | None:
    return (now, highest) if now and highest and now < highest else None


_STATE = (
    _health,
    _ecc,
    _rows,
    _xids,
    _throttling,
    _power,
    _clocks,
    _persistence,
    _pcie_width,
    _pcie_generation,
)


# Checks of the processes on devices; and the fix for one, which ends workers of dead runs.


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
    done = table.end(lambda: alive(workers), GRACE_S)
    ended = ""
    if done.ended:
        names = table.named(done.ended)
        ended = f"ended {counted(len(done.ended), 'worker')} of dead runs: {names}"
    stuck = f"could not end {table.named(done.left)}" if done.left else ""
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


_USE = (_orphans, _busy, _memory)

CHECKS = (*_STATE, *_USE)
