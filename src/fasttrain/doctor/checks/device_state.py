"""Checks of how the devices are: errors, clocks, power, and their way to the processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from fasttrain.doctor.checks.words import check, named
from fasttrain.model.examination import DeviceState, Examination, Finding
from fasttrain.model.vendors import DeviceKind
from fasttrain.planning.describe import counted

T = TypeVar("T")

# Logged for faults of the program as a rule: a bad index, an illegal access, an aborted process.
# Source: docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors with the Xid Catalog", 2026.
_XIDS_OF_PROGRAMS = frozenset({13, 31, 43, 45})


@dataclass(frozen=True, slots=True)
class _Group(Generic[T]):
    """Devices of one kind of which the same was read."""

    reading: T
    states: tuple[DeviceState, ...]

    @property
    def kind(self) -> DeviceKind:
        return self.states[0].kind

    def __str__(self) -> str:
        return named(self.states)

    def command(self, options: str, otherwise: str) -> str:
        """Return the call of nvidia-smi for these devices, or what to do about other vendors'."""
        if self.kind != "cuda":
            return otherwise
        ids = ",".join(str(index) for index in sorted({state.index for state in self.states}))
        return f"sudo nvidia-smi -i {ids} {options}"


def _groups(seen: Examination, read: Callable[[DeviceState], T | None]) -> Iterator[_Group[T]]:
    """Yield the devices by what `read` says of them, without those of which it says nothing.

    One fact about eight devices is one finding, not eight.
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
            why="a run on it may fail or be wrong",
            fix="see its fault with the vendor's tool, and leave it out with --gpus till then",
        )


@check("ecc-errors", "uncorrected memory errors")
def _ecc(seen: Examination) -> Iterator[Finding]:
    for group in _groups(seen, lambda state: state.ecc_uncorrected):
        each = ", each," if len(group.states) > 1 else ""
        yield _ecc.finding(
            "error",
            f"{counted(group.reading, 'uncorrected memory error')} on {group}{each} since the "
            "driver was loaded",
            why="data were lost; a run that uses that memory fails or is wrong",
            fix=group.command("--gpu-reset", "restart the machine")
            + " while nothing runs on it; if they come back, have the board replaced",
        )


@check("row-remap", "memory rows that could not be remapped")
def _rows(seen: Examination) -> Iterator[Finding]:
    for group in _groups(seen, lambda state: state.rows_failed):
        yield _rows.finding(
            "error",
            f"a broken row of memory could not be replaced on {group}",
            # Source: docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt, "RMA Policy Thresholds for
            # Row-Remapping"; NVML tells of a failure in the past.
            why="its spare rows are used up, so memory errors will come again",
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
            why="faults of a program as a rule, and past"
            if of_programs
            else "errors of the hardware, the driver or a link",
            fix="look the numbers up in docs.nvidia.com/deploy/xid-errors; sudo dmesg | grep Xid "
            "tells when and which process",
        )


@check("throttling", "clocks that are held down at the moment")
def _throttling(seen: Examination) -> Iterator[Finding]:
    for group in _groups(seen, lambda state: state.throttled):
        # Under load the power limit holds every large board; heat and hardware should not.
        by_power = set(group.reading) == {"power"}
        yield _throttling.finding(
            "hint" if by_power else "warning",
            f"the clocks of {group} are held down by: {', '.join(group.reading)}",
            why="a run is slower while this lasts",
            fix=_throttling_fix(group.kind, by_power=by_power),
        )


def _throttling_fix(kind: DeviceKind, *, by_power: bool) -> str:
    fix = "compare the power limits" if by_power else "see to fans, airflow and power supply"
    shown = "POWER" if by_power else "PERFORMANCE,TEMPERATURE"
    return f"{fix}: nvidia-smi -q -d {shown}" if kind == "cuda" else fix


@check("power-limit", "power limits below the board's own")
def _power(seen: Examination) -> Iterator[Finding]:
    for group in _groups(seen, _lowered_power):
        limit, default = group.reading
        yield _power.finding(
            "warning",
            f"the power limit of {group} is {limit} W; the board's own is {default} W",
            why="the clocks fall whenever a run needs more",
            fix=group.command(f"-pl {default}", "set it back with the vendor's tool"),
        )


def _lowered_power(state: DeviceState) -> tuple[int, int] | None:
    if state.power_limit_w is None or state.power_default_w is None:
        return None
    # In whole watts: drivers round the two in different ways.
    limit, default = round(state.power_limit_w), round(state.power_default_w)
    return (limit, default) if limit < default else None


@check("clock-limit", "clocks that are locked below the board's highest")
def _clocks(seen: Examination) -> Iterator[Finding]:
    for group in _groups(seen, _lowered_clock):
        limit, highest = group.reading
        yield _clocks.finding(
            "hint",
            f"the clocks of {group} end at {limit} MHz; the board goes up to {highest} MHz",
            why="a run that has the power for more doesn't get it",
            fix=group.command("-rac", "set them back with the vendor's tool")
            + ", unless the maker of the machine meant it so",
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
            why="the driver lets go of an idle GPU, and every start waits for it to come back",
            fix="sudo systemctl enable --now nvidia-persistenced, or "
            + group.command("-pm 1", "the vendor's own service"),
        )


@check("pcie-width", "PCIe links that run with fewer lanes than they could")
def _pcie_width(seen: Examination) -> Iterator[Finding]:
    for group in _groups(seen, lambda state: _below(state.pcie_width, state.pcie_width_max)):
        lanes, highest = group.reading
        yield _pcie_width.finding(
            "warning",
            f"the PCIe link of {group} runs on {lanes} lanes of {highest}",
            why="batches and gradients take longer over it",
            fix="put the board into a slot with all lanes, and see that it and its riser sit well",
        )


@check("pcie-generation", "PCIe links that run at a lower generation than they could")
def _pcie_generation(seen: Examination) -> Iterator[Finding]:
    for group in _groups(seen, lambda state: _below(state.pcie_gen, state.pcie_gen_max)):
        generation, highest = group.reading
        yield _pcie_generation.finding(
            "hint",
            f"the PCIe link of {group} runs at generation {generation}; it could at {highest}",
            why="each generation halves the speed of the next",
            fix="see the slot's setting in the BIOS, and that board and riser sit well",
        )


def _below(now: int | None, highest: int | None) -> tuple[int, int] | None:
    return (now, highest) if now and highest and now < highest else None


CHECKS = (
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
