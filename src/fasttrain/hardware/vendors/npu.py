"""Huawei Ascend NPUs, by their device files and ``npu-smi info``."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from fasttrain.hardware.host import Host, Vendor, VendorReport
from fasttrain.hardware.runs import RunProcess
from fasttrain.hardware.tool import ToolError, first_line
from fasttrain.hardware.vendors.npu_smi import Chip, NpuSmi, SmiTable, parse_npu_smi
from fasttrain.hardware.vendors.npu_state import npu_states
from fasttrain.model.examination import DeviceState
from fasttrain.model.machine import Device, Overflow
from fasttrain.model.vendors import DeviceKind

# Source: torch_npu 2.13.0, is_bf16_supported over all its soc names: Ascend910B1 and later, of
# which 310P is none. A "910B" without a digit is a first-generation card.
_BF16 = re.compile(r"Ascend(910B\d.*|910_93.*|310B.*|950.*)")
_NO_BF16 = re.compile(r"Ascend(910(A|B|Pro.*|Premium.*)?|310|310P.*)")
# Source: torch_npu 2.13.0, is_support_inf_nan over all its soc names: those of bf16 but for 310B.
_SATURATES = re.compile(rf"{_NO_BF16.pattern}|Ascend310B.*")


# What doctor knows notes by that it tells of in a finding of its own.
NPU_WITHOUT = "torch_npu is installed, but"
HEALTH = "reports its health as"

NOT_INSTALLED = "torch_npu is not installed"


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@dataclass(frozen=True, slots=True)
class Npu:
    """Ascend's probe; `installed` tells whether a package could be imported."""

    host: Host
    installed: Callable[[str], bool] = _is_installed
    smi: NpuSmi | None = None
    kind: ClassVar[DeviceKind] = "npu"

    def probe(self) -> VendorReport:
        """Return chips in the order of their logic ids, which ASCEND_RT_VISIBLE_DEVICES counts."""
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
    # NPU ids skip numbers (a container may hold only NPU 2) while logic ids don't.
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
    """Return the driver's version from its own file; empty in containers that don't map it."""
    where = re.search(r"Driver_Install_Path_Param=(\S+)", host.read("etc/ascend_install.info"))
    folder = (where[1] if where else "/usr/local/Ascend").lstrip("/")
    version = re.search(r"^Version=(\S+)", host.read(f"{folder}/driver/version.info"), re.MULTILINE)
    return version[1] if version else ""
