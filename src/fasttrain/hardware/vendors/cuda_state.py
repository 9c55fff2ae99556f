"""The current state of NVIDIA's GPUs and MIG instances, read by NVML."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from fasttrain.hardware.host import Host
from fasttrain.hardware.runs import RunProcess, as_device_process
from fasttrain.hardware.tool import ToolError, run_tool
from fasttrain.hardware.vendors.cuda_links import Gpu, link_names, peer_access
from fasttrain.hardware.vendors.kernel_files import numa_node, pci_folder
from fasttrain.model.examination import DeviceProcess, DeviceState
from fasttrain.model.machine import Device

# NVIDIA's Xid errors in the kernel's log since boot.


DMESG_TIMEOUT_S = 1.0

# Source: NVIDIA, "Xid Errors", r570: "NVRM: Xid (PCI:0000:03:00): 79, ..."; older drivers leave
# the "PCI:" out.
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-f:]+)(?:\.0)?\): (\d+)", re.IGNORECASE)


def read_xids(host: Host) -> dict[str, tuple[int, ...]]:
    """Return the distinct Xids logged for each PCI address, such as ``0000:c1:00``.

    Only the kernel's own buffer is read, because files in /var/log hold errors of earlier boots.
    Many machines don't let users read it; the result is then empty.
    """
    tool = host.which("dmesg", "usr/bin", "bin")
    try:
        log = run_tool([tool], timeout_s=DMESG_TIMEOUT_S) if tool else ""
    except ToolError:
        log = ""
    return parse_xids(log)


def parse_xids(log: str) -> dict[str, tuple[int, ...]]:
    """Return the Xids in a kernel log by PCI address, in the order of first appearance."""
    found: dict[str, dict[int, None]] = {}
    for address, number in _XID.findall(log):
        found.setdefault(address.lower(), {})[int(number)] = None
    return {address: tuple(numbers) for address, numbers in found.items()}


# Bits of nvmlDeviceGetCurrentClocksThrottleReasons that slow work down. Not counted: idle, clocks
# set on purpose (application, display), and sync boost. A power brake comes from the power supply.
# Source: NVML API Reference 13.0, nvmlClocksEventReasons.
THROTTLING = {"power": 0x4, "thermal": 0x20 | 0x40, "hardware": 0x8 | 0x80}


def cuda_states(
    host: Host, devices: Iterable[Device], runs: Mapping[int, RunProcess], nvml: Any = None
) -> tuple[DeviceState, ...]:
    """Return the states of a machine's NVIDIA devices, in their order.

    Values that NVML doesn't have for a device are None. Without a working NVML there are no states;
    the machine's notes have the reason.

    Args:
        host: The machine.
        devices: All its devices.
        runs: Processes of fasttrain's runs.
        nvml: Replaces the ``pynvml`` module in tests.
    """
    ours = [device for device in devices if device.kind == "cuda"]
    if not ours:
        return ()
    nvml = nvml or import_nvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        return _states(nvml, host, ours, runs)
    finally:
        nvml.nvmlShutdown()


def import_nvml() -> Any:
    """Return NVML's binding; imported late, as only machines with a driver need it."""
    import pynvml

    return pynvml


def _states(
    nvml: Any, host: Host, devices: list[Device], runs: Mapping[int, RunProcess]
) -> tuple[DeviceState, ...]:
    boards = {d.index: _open(nvml, nvml.nvmlDeviceGetHandleByIndex, d.index) for d in devices}
    # MIG instances have no links, neither to each other nor to another GPU.
    whole = {
        d.index: boards[d.index]
        for d in devices
        if not d.parent_uuid and boards[d.index].handle is not None
    }
    links, peers, xids = link_names(whole), peer_access(whole), read_xids(host)

    def state(device: Device) -> DeviceState:
        part = board = boards[device.index]
        if device.parent_uuid:
            part = _open(nvml, nvml.nvmlDeviceGetHandleByUUID, device.uuid)
        address = board.address()
        return DeviceState(
            kind="cuda",
            index=device.index,
            uuid=device.uuid,
            memory_used_bytes=_memory_used_bytes(part),
            processes=_processes(part, runs),
            xids=xids.get(address, ()),
            numa_node=numa_node(host, pci_folder(f"{address}.0")),
            links=links.get(device.index, {}),
            peer_access=peers.get(device.index),
            **_clocks(board),
            **_wear(board),
        )

    return tuple(state(device) for device in devices)


def _open(nvml: Any, by: Callable[[Any], Any], name: Any) -> Gpu:
    try:
        return Gpu(nvml, by(name))
    except nvml.NVMLError:  # it fell off the bus after the probe
        return Gpu(nvml, None)


def _memory_used_bytes(part: Gpu) -> int | None:
    # Version 1 also counts what the driver reserves for itself, even on an idle board.
    memory = part.get("MemoryInfo", part.nvml.nvmlMemory_v2) or part.get("MemoryInfo")
    return int(memory.used) if memory else None


def _processes(part: Gpu, runs: Mapping[int, RunProcess]) -> tuple[DeviceProcess, ...]:
    """Return the processes that compute on a device, followed by those that only draw on it.

    Source: NVML API Reference 13.0, nvmlDeviceGetComputeRunningProcesses: those with a compute
    context; nvmlDeviceGetGraphicsRunningProcesses: those with one for graphics. One process may
    have both, such as a desktop's compositor.
    """
    computing = list(part.get("ComputeRunningProcesses") or ())
    drawing = list(part.get("GraphicsRunningProcesses") or ())
    listed, displays = {item.pid for item in computing}, {item.pid for item in drawing}
    return tuple(
        replace(
            as_device_process(item.pid, item.usedGpuMemory or 0, runs),  # None under Windows
            display=item.pid in displays,
        )
        for item in (*computing, *(item for item in drawing if item.pid not in listed))
    )


def _clocks(board: Gpu) -> dict[str, Any]:
    reasons = board.get("CurrentClocksThrottleReasons") or 0
    persistence = board.get("PersistenceMode")
    return {
        "throttled": tuple(name for name, bits in THROTTLING.items() if reasons & bits),
        "power_limit_w": _watts(board.get("PowerManagementLimit")),
        "power_default_w": _watts(board.get("PowerManagementDefaultLimit")),
        "clock_limit_mhz": _clock_limit_mhz(board),
        "clock_max_mhz": board.get("MaxClockInfo", board.nvml.NVML_CLOCK_GRAPHICS),
        "temperature_c": board.get("Temperature", board.nvml.NVML_TEMPERATURE_GPU),
        "persistence": None if persistence is None else bool(persistence),
    }


def _clock_limit_mhz(board: Gpu) -> int | None:
    """Return the highest clock allowed; NVML doesn't report clocks locked by ``nvidia-smi -lgc``.

    Default application clocks limit nothing: a V100's are 1312 MHz, and it boosts to 1530 by
    itself. Only changed ones count.
    """
    nvml, graphics = board.nvml, board.nvml.NVML_CLOCK_GRAPHICS
    limits = [board.get("Clock", graphics, nvml.NVML_CLOCK_ID_CUSTOMER_BOOST_MAX)]
    target = board.get("Clock", graphics, nvml.NVML_CLOCK_ID_APP_CLOCK_TARGET)
    if target != board.get("Clock", graphics, nvml.NVML_CLOCK_ID_APP_CLOCK_DEFAULT):
        limits.append(target)
    return min((limit for limit in limits if limit), default=None)


def _wear(board: Gpu) -> dict[str, Any]:
    """Return memory errors and the state of the PCIe link."""
    nvml = board.nvml
    rows = board.get("RemappedRows")
    return {
        "ecc_uncorrected": board.get(
            "TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        "rows_failed": bool(rows and rows[3]),
        # Not the current generation, which an idle board lowers to save power. The highest one that
        # board and slot have in common is that of the link under load.
        "pcie_gen": board.get("MaxPcieLinkGeneration"),
        "pcie_gen_max": board.get("GpuMaxPcieLinkGeneration"),
        "pcie_width": board.get("CurrPcieLinkWidth"),
        "pcie_width_max": board.get("MaxPcieLinkWidth"),
    }


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
