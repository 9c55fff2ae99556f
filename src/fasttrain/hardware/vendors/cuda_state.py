"""How NVIDIA's GPUs and MIG instances are at the moment, by NVML."""

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

# NVIDIA's Xid errors, as the kernel logged them since it was booted.


DMESG_TIMEOUT_S = 1.0

# Source: NVIDIA, "Xid Errors", r570: "NVRM: Xid (PCI:0000:03:00): 79, ..."; older drivers leave
# the "PCI:" out.
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-f:]+)(?:\.0)?\): (\d+)", re.IGNORECASE)


def read_xids(host: Host) -> dict[str, tuple[int, ...]]:
    """Return the numbers logged for each PCI address, such as ``0000:c1:00``, each once.

    Only the kernel's own buffer is read, since files below /var/log hold errors of boots long
    past. It is closed to users on many machines; nothing is known of any Xid there.
    """
    tool = host.which("dmesg", "usr/bin", "bin")
    try:
        log = run_tool([tool], timeout_s=DMESG_TIMEOUT_S) if tool else ""
    except ToolError:
        log = ""
    return parse_xids(log)


def parse_xids(log: str) -> dict[str, tuple[int, ...]]:
    """Return the Xids in a kernel log by PCI address, in the order of their first appearance."""
    found: dict[str, dict[int, None]] = {}
    for address, number in _XID.findall(log):
        found.setdefault(address.lower(), {})[int(number)] = None
    return {address: tuple(numbers) for address, numbers in found.items()}


# Bits of nvmlDeviceGetCurrentClocksThrottleReasons that slow work down. Left out: idle, clocks set
# on purpose (application, display) and sync boost. A power brake is the supply's own signal.
# Source: NVML API Reference 13.0, nvmlClocksEventReasons.
THROTTLING = {"power": 0x4, "thermal": 0x20 | 0x40, "hardware": 0x8 | 0x80}


def cuda_states(
    host: Host, devices: Iterable[Device], runs: Mapping[int, RunProcess], nvml: Any = None
) -> tuple[DeviceState, ...]:
    """Return the states of a machine's NVIDIA devices, in their order.

    What NVML can't tell of a device is None in its state. A broken NVML gives no states; the probe
    of the machine has told why.

    Args:
        host: The machine.
        devices: All its devices.
        runs: Processes of fasttrain's runs.
        nvml: Stands in for the ``pynvml`` module in tests.
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
    """Return NVML's binding, which only machines with a driver need."""
    import pynvml

    return pynvml


def _states(
    nvml: Any, host: Host, devices: list[Device], runs: Mapping[int, RunProcess]
) -> tuple[DeviceState, ...]:
    boards = {d.index: _open(nvml, nvml.nvmlDeviceGetHandleByIndex, d.index) for d in devices}
    # MIG instances neither reach each other nor another GPU.
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
    except nvml.NVMLError:  # fallen off the bus since the machine was probed: nothing to tell
        return Gpu(nvml, None)


def _memory_used_bytes(part: Gpu) -> int | None:
    # The first version counts as used what the driver reserves for itself, also on an idle board.
    memory = part.get("MemoryInfo", part.nvml.nvmlMemory_v2) or part.get("MemoryInfo")
    return int(memory.used) if memory else None


def _processes(part: Gpu, runs: Mapping[int, RunProcess]) -> tuple[DeviceProcess, ...]:
    """Return who computes on a device, and after them who only draws on it.

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
    """Return the highest clock allowed; clocks locked by ``nvidia-smi -lgc`` can't be asked for.

    Application clocks as they come from the factory hold nothing down: a V100's are 1312 MHz, and
    it boosts to 1530 of its own. Only those that somebody changed count.
    """
    nvml, graphics = board.nvml, board.nvml.NVML_CLOCK_GRAPHICS
    limits = [board.get("Clock", graphics, nvml.NVML_CLOCK_ID_CUSTOMER_BOOST_MAX)]
    target = board.get("Clock", graphics, nvml.NVML_CLOCK_ID_APP_CLOCK_TARGET)
    if target != board.get("Clock", graphics, nvml.NVML_CLOCK_ID_APP_CLOCK_DEFAULT):
        limits.append(target)
    return min((limit for limit in limits if limit), default=None)


def _wear(board: Gpu) -> dict[str, Any]:
    """Return errors of memory, and the PCIe link."""
    nvml = board.nvml
    rows = board.get("RemappedRows")
    return {
        "ecc_uncorrected": board.get(
            "TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        "rows_failed": bool(rows and rows[3]),
        # Not the link's current generation, which an idle board lowers to save power: what board
        # and slot can do together is what it runs at under load.
        "pcie_gen": board.get("MaxPcieLinkGeneration"),
        "pcie_gen_max": board.get("GpuMaxPcieLinkGeneration"),
        "pcie_width": board.get("CurrPcieLinkWidth"),
        "pcie_width_max": board.get("MaxPcieLinkWidth"),
    }


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
