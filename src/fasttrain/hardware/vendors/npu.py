"""Huawei Ascend NPUs, read from their device files and ``npu-smi info``."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from fasttrain.hardware.host import Host, Vendor, VendorReport
from fasttrain.hardware.runs import RunProcess, as_device_process
from fasttrain.hardware.tool import ToolError, first_line, run_tool
from fasttrain.hardware.vendors.kernel_files import numa_node, pci_folder
from fasttrain.model.machine import Device, DeviceProcess, DeviceState, Overflow
from fasttrain.model.vendors import DeviceKind

# Runs ``npu-smi info`` once, and reads its table in each of its layouts.


# The tool queries one card after the other, which can take seconds with 16 chips.
TIMEOUT_S = 10.0

_HEAD = re.compile(r"(\d+)\s+(\S+)")
_USAGE = re.compile(r"\d+\s*/\s*(\d+)")
_VERSION = re.compile(r"Version:\s*(\S+)")

NO_TABLE = "not the table of npu-smi info"


class NpuSmi:
    """The tool ``npu-smi``, which runs once for all callers.

    Attributes:
        tool: Its path; empty if there is none.
    """

    def __init__(self, host: Host, *, timeout_s: float = TIMEOUT_S) -> None:
        self.tool = host.which("npu-smi", "usr/local/bin", "usr/local/sbin")
        self._timeout_s = timeout_s
        self._answer: str | ToolError | None = None

    def info(self) -> str:
        """Return the output of ``npu-smi info``, which runs at the first call only.

        Raises:
            ToolError: If it failed, or gave no answer in time.
        """
        if self._answer is None:
            try:
                self._answer = run_tool([self.tool, "info"], timeout_s=self._timeout_s)
            except ToolError as error:
                self._answer = error
        if isinstance(self._answer, ToolError):
            raise self._answer
        return self._answer


@dataclass(frozen=True, slots=True)
class Chip:
    """One chip: its card's NPU id, soc name such as ``Ascend910B3``, health and memory."""

    npu: int
    name: str
    health: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class SmiTable:
    """The tool's own version, and the chips in the order of their logic ids."""

    version: str
    chips: tuple[Chip, ...]


def parse_npu_smi(text: str) -> SmiTable:
    """Return the table that ``npu-smi info`` printed.

    Every chip has two rows, first its name and health, then its bus and memory. The layouts
    differ in the columns: Atlas A2 shows DDR and HBM, 310P only DDR, A3 and 310P a second id in
    the second row, A5 puts the NPU id into a cell of its own.

    Raises:
        ValueError: If the text is no such table, or is cut off.
    """
    version = _VERSION.search(text)
    if version is None:
        raise ValueError(NO_TABLE)
    rows = _rows(text)
    return SmiTable(version[1], tuple(_chip(head, next(rows, None)) for head in rows))


def _rows(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of chips as (ids, health or bus, figures); skip titles and processes."""
    titles_over = False
    for line in text.splitlines():
        if "Process id" in line:
            return
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.lstrip().startswith("|") or len(cells) < 3:
            continue
        ids = " ".join(cells[:-2]).strip()
        titles_over = titles_over or bool(_HEAD.fullmatch(ids))
        if titles_over:
            yield ids, cells[-2], cells[-1]


def _chip(head: tuple[str, str, str], detail: tuple[str, str, str] | None) -> Chip:
    named = _HEAD.fullmatch(head[0])
    totals = [int(total) for total in _USAGE.findall(detail[2])] if detail else []
    if named is None or not totals:
        raise ValueError(f"the rows of NPU {head[0]!r} are cut off or of an unknown layout")
    # DDR comes before HBM; chips with HBM report 0 / 0 DDR, chips without have no HBM column.
    mebibytes = next((total for total in reversed(totals) if total), 0)
    return Chip(int(named[1]), soc_name(named[2]), head[1], mebibytes * 2**20)


def soc_name(name: str) -> str:
    """Return the soc name for a printed chip name: ``Ascend910B3`` for ``910B3``.

    A3 prints only ``Ascend910`` for every Ascend910_93xx. First-generation cards print their name
    without ``Ascend``, so ``910`` is another chip than ``Ascend910``.
    """
    if name == "Ascend910":
        return "Ascend910_93"
    return name if name.startswith("Ascend") else f"Ascend{name}"


# The current state of Ascend's chips, read from ``npu-smi info``.


MIB = 2**20

_USED = re.compile(r"(\d+)\s*/\s*(\d+)")


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
    rows = [cells for cells in _cells(table) if _USED.search(cells[-1])]
    if len(rows) != 2 * len(chips):
        raise ValueError("the rows of npu-smi info are of an unknown layout")
    states = [
        ChipState(chip.npu, _first_number(row[0]), chip.health, row[-2], _used_bytes(row[-1]))
        for chip, row in zip(chips, rows[1::2], strict=True)
    ]
    return states, list(_chip_processes(rest))


def _cells(text: str) -> Iterator[list[str]]:
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
    pairs = [(int(used), int(total)) for used, total in _USED.findall(figures)]
    return next((used * MIB for used, total in reversed(pairs) if total), None)


def _chip_processes(text: str) -> Iterator[ChipProcess]:
    """Yield the processes listed after the chips: ids, pid, name and MB."""
    for cells in _cells(text):
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


# Huawei Ascend NPUs, read from their device files and ``npu-smi info``.


# Source: torch_npu 2.13.0, is_bf16_supported over all its soc names: Ascend910B1 and later, of
# which exclude 310P. A "910B" without a digit is a first-generation card.
_BF16 = re.compile(r"Ascend(910B\d.*|910_93.*|310B.*|950.*)")
_NO_BF16 = re.compile(r"Ascend(910(A|B|Pro.*|Premium.*)?|310|310P.*)")
# Source: torch_npu 2.13.0, is_support_inf_nan over all its soc names: as bf16, but not 310B.
_SATURATES = re.compile(rf"{_NO_BF16.pattern}|Ascend310B.*")


# By these words doctor recognises notes for which it has a finding of its own.
NPU_WITHOUT = "torch_npu is installed, but"
HEALTH = "reports its health as"

NOT_INSTALLED = "torch_npu is not installed"


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@dataclass(frozen=True, slots=True)
class Npu:
    """Ascend's probe; ``installed(package)`` is true if the script could import a package."""

    host: Host
    installed: Callable[[str], bool] = _is_installed
    smi: NpuSmi | None = None
    kind: ClassVar[DeviceKind] = "npu"

    def probe(self) -> VendorReport:
        """Return chips in the order of their logic ids, which ASCEND_RT_VISIBLE_DEVICES uses."""
        nodes = len(self.host.numbered("dev", r"davinci(\d+)"))
        smi = self.smi or NpuSmi(self.host)
        devices: tuple[Device, ...] = ()
        notes: list[str] = []
        driver = _driver_version(self.host)
        if smi.tool:
            try:
                table = _ask(smi)
            except ToolError as error:
                notes.append(f"an Ascend driver is here, but its NPUs can't be used: {error}")
            else:
                devices, driver = _devices(table.chips), driver or table.version
                notes += _chip_notes(table.chips, nodes)
        elif nodes:
            devices = tuple(Device("npu", index, "Ascend NPU", fp16=True) for index in range(nodes))
            notes.append(
                f"{nodes} Ascend device files are here but no npu-smi, so the chips' names are "
                "unknown and bf16 is not taken for granted"
            )
        return VendorReport(devices, driver, (*notes, *self._software_notes(bool(devices))))

    def states(
        self, devices: Iterable[Device], runs: Mapping[int, RunProcess]
    ) -> tuple[DeviceState, ...]:
        """Return how its chips are, by the answer that `probe` was given."""
        return npu_states(self.host, devices, runs, self.smi)

    def _software_notes(self, has_devices: bool) -> list[str]:
        if not self.installed("torch_npu"):
            return [f"NPUs are here, but {NOT_INSTALLED}"] if has_devices else []
        if self.host.environ.get("ASCEND_HOME_PATH") or _autoload_is_off(self.host):
            return []
        return [
            f"{NPU_WITHOUT} ASCEND_HOME_PATH is not set, and `import torch` fails "
            "while torch_npu can't load CANN: source CANN's set_env.sh, or set "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 to do without NPUs"
        ]


def vendor(host: Host, installed: Callable[[str], bool]) -> Vendor:
    """Return the probe."""
    return Npu(host, installed, NpuSmi(host))


def _autoload_is_off(host: Host) -> bool:
    return host.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0"


def _ask(smi: NpuSmi) -> SmiTable:
    text = smi.info()
    try:
        return parse_npu_smi(text)
    except ValueError as error:
        raise ToolError(f"{smi.tool} info: {error} ({first_line(text) or 'no output'})") from error


def _devices(chips: tuple[Chip, ...]) -> tuple[Device, ...]:
    # The index is the logic id. NPU ids may have gaps: a container may have NPU 2 only.
    return tuple(
        Device(
            kind="npu",
            index=index,
            name=chip.name,
            memory_bytes=chip.memory_bytes,
            capability=chip.name,
            bf16=bool(_BF16.fullmatch(chip.name)),
            fp16=True,
            overflow=_overflow(chip.name),
        )
        for index, chip in enumerate(chips)
    )


def _overflow(name: str) -> Overflow:
    if _SATURATES.fullmatch(name):
        return "saturates"
    return "inf" if _BF16.fullmatch(name) else ""


def _chip_notes(chips: tuple[Chip, ...], nodes: int) -> list[str]:
    notes = [
        f"NPU {chip.npu} ({chip.name}) {HEALTH} {chip.health}"
        for chip in chips
        if chip.health != "OK"
    ]
    notes += [
        f"{name} is unknown to fasttrain, so bf16 is not taken for granted"
        for name in sorted({chip.name for chip in chips})
        if not _BF16.fullmatch(name) and not _NO_BF16.fullmatch(name)
    ]
    if 0 < nodes < len(chips):
        notes.append(f"npu-smi lists {len(chips)} chips, but only {nodes} device files are here")
    return notes


def _driver_version(host: Host) -> str:
    """Return the driver's version from its file; empty in containers without that file."""
    where = re.search(r"Driver_Install_Path_Param=(\S+)", host.read("etc/ascend_install.info"))
    folder = (where[1] if where else "/usr/local/Ascend").lstrip("/")
    version = re.search(r"^Version=(\S+)", host.read(f"{folder}/driver/version.info"), re.MULTILINE)
    return version[1] if version else ""
