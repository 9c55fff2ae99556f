"""The current state of Ascend's chips, read from ``npu-smi info``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fasttrain.hardware.host import Host
from fasttrain.hardware.runs import RunProcess, as_device_process
from fasttrain.hardware.tool import ToolError
from fasttrain.hardware.vendors.kernel_files import numa_node, pci_folder
from fasttrain.hardware.vendors.npu_smi import NpuSmi, parse_npu_smi
from fasttrain.model.examination import DeviceProcess, DeviceState
from fasttrain.model.machine import Device

MIB = 2**20

_USAGE = re.compile(r"(\d+)\s*/\s*(\d+)")


@dataclass(frozen=True, slots=True)
class ChipState:
    """One chip: its NPU id, its number on the card, health, bus and memory in use."""

    npu: int
    chip: int
    health: str
    bus: str
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class ChipProcess:
    """A process on a chip, as npu-smi lists it."""

    npu: int
    chip: int
    pid: int
    command: str
    memory_bytes: int


def npu_states(
    host: Host,
    devices: Iterable[Device],
    runs: Mapping[int, RunProcess],
    smi: NpuSmi | None = None,
) -> tuple[DeviceState, ...]:
    """Return the states of a machine's NPUs, in their order.

    Without a working npu-smi there are none; the machine's notes have the reason.

    Args:
        host: The machine.
        devices: All its devices.
        runs: Processes of fasttrain's runs.
        smi: The tool, if it has run already.
    """
    ours = [device for device in devices if device.kind == "npu"]
    smi = smi or NpuSmi(host)
    if not ours or not smi.tool:
        return ()
    try:
        chips, processes = parse_states(smi.info())
    except (ToolError, ValueError):
        return ()
    if len(chips) != len(ours):  # a card came or went since the probe: the order is unknown
        return ()
    return tuple(
        DeviceState(
            kind="npu",
            index=device.index,
            uuid=device.uuid,
            memory_used_bytes=chip.used_bytes,
            processes=tuple(_processes_on(chip, processes, runs)),
            health=chip.health,
            numa_node=numa_node(host, pci_folder(chip.bus)),
        )
        for device, chip in zip(ours, chips, strict=True)
    )


def parse_states(text: str) -> tuple[list[ChipState], list[ChipProcess]]:
    """Return the chips and processes in the output of ``npu-smi info``.

    Raises:
        ValueError: If the text is no such table, or is cut off.
    """
    chips = parse_npu_smi(text).chips
    table, _, rest = text.partition("Process id")
    # Each chip has two rows that end in figures: pages in use, then memory.
    rows = [cells for cells in _rows(table) if _USAGE.search(cells[-1])]
    if len(rows) != 2 * len(chips):
        raise ValueError("the rows of npu-smi info are of an unknown layout")
    states = [
        ChipState(chip.npu, _first_number(row[0]), chip.health, row[-2], _used_bytes(row[-1]))
        for chip, row in zip(chips, rows[1::2], strict=True)
    ]
    return states, list(_chip_processes(rest))


def _rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.lstrip().startswith("|"):
            cells = [cell.strip() for cell in line.strip().removeprefix("|").rstrip("|").split("|")]
            if len(cells) >= 3:
                yield cells


def _first_number(text: str) -> int:
    """Return a chip's number on its card; 0 in the layout without such numbers."""
    words = text.split()
    return int(words[0]) if words else 0


def _used_bytes(figures: str) -> int | None:
    # DDR comes before HBM; chips with HBM report 0 / 0 DDR, chips without have no HBM column.
    pairs = [(int(used), int(total)) for used, total in _USAGE.findall(figures)]
    return next((used * MIB for used, total in reversed(pairs) if total), None)


def _chip_processes(text: str) -> Iterator[ChipProcess]:
    """Yield the processes listed after the chips: ids, pid, name and MB."""
    for cells in _rows(text):
        ids = cells[0].split()
        if len(cells) >= 4 and all(word.isdecimal() for word in (*ids, cells[1], cells[3])):
            # Newer tools add a column with the pid inside of the container.
            inside = cells[4] if len(cells) > 4 and cells[4].isdecimal() else cells[1]
            chip = int(ids[1]) if len(ids) > 1 else 0
            yield ChipProcess(int(ids[0]), chip, int(inside), cells[2], int(cells[3]) * MIB)


def _processes_on(
    chip: ChipState, processes: Iterable[ChipProcess], runs: Mapping[int, RunProcess]
) -> Iterator[DeviceProcess]:
    for process in processes:
        if (process.npu, process.chip) == (chip.npu, chip.chip):
            yield as_device_process(process.pid, process.memory_bytes, runs, process.command)
