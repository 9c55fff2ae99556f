"""The current state of NVIDIA's GPUs and MIG instances, read by NVML."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fasttrain.hardware.host import Host
from fasttrain.hardware.runs import RunProcess, as_device_process
from fasttrain.hardware.tool import ToolError, run_tool
from fasttrain.hardware.vendors.kernel_files import numa_node, pci_folder
from fasttrain.model.machine import Device, DeviceProcess, DeviceState

# How NVIDIA's GPUs reach each other: NVLink, PCIe and peer access, by NVML.


# Indices of nvmlDeviceGetP2PStatus. The binding's own NVML_P2P_CAPS_INDEX_READ is the tuple (0,),
# by a stray comma (nvidia-ml-py 13.615).
P2P_READ, P2P_NVLINK = 0, 2

SWITCH = "NVSwitch"

# Names of nvidia-smi topo -m for NVML's levels, from one bridge to another socket.
# Source: NVML API Reference 13.0, nvmlGpuTopologyLevel_t; nvidia-smi topo -h, 570.
LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device in NVML; `handle` is None if it can't be reached any more."""

    nvml: Any
    handle: Any

    def get(self, what: str, *args: Any) -> Any:
        """Return the answer of ``nvmlDeviceGet<what>``; None if board or driver has none."""
        if self.handle is None:
            return None
        try:
            return getattr(self.nvml, f"nvmlDeviceGet{what}")(self.handle, *args)
        # The binding raises the second error if the driver is older than the binding.
        except (self.nvml.NVMLError, self.nvml.NVMLLibraryMismatchError):
            return None

    def address(self) -> str:
        """Return the PCI address without its function, such as ``0000:c1:00``; empty if unknown."""
        pci = self.get("PciInfo")
        return pci_address(pci) if pci else ""


def pci_address(pci: Any) -> str:
    """Return an address as the kernel writes it; NVML's text has eight digits for the domain."""
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}"


def link_names(gpus: Mapping[int, Gpu]) -> dict[int, dict[str, str]]:
    """Return each GPU's link to each other one, by indices, as ``nvidia-smi topo -m`` names it."""
    nvlinks = {index: _nvlinks(gpu) for index, gpu in gpus.items()}
    addresses = {index: gpu.address() for index, gpu in gpus.items()}

    def name(one: int, other: int) -> str:
        status = gpus[one].get("P2PStatus", gpus[other].handle, P2P_NVLINK)
        # Through an NVSwitch every GPU reaches every other with all of its links.
        switched = min(nvlinks[one][SWITCH], nvlinks[other][SWITCH])
        links = nvlinks[one][addresses[other]] or switched
        if links and status == gpus[one].nvml.NVML_P2P_STATUS_OK:
            return f"NV{links}"
        return LEVELS.get(gpus[one].get("TopologyCommonAncestor", gpus[other].handle), "")

    return {
        one: {str(other): found for other in gpus if other != one and (found := name(one, other))}
        for one in gpus
    }


def peer_access(gpus: Mapping[int, Gpu]) -> dict[int, tuple[int, ...] | None]:
    """Return the GPUs whose memory each can read; None if the driver gives no answer."""
    answer: dict[int, tuple[int, ...] | None] = {}
    for one, gpu in gpus.items():
        statuses = {
            other: gpu.get("P2PStatus", peer.handle, P2P_READ)
            for other, peer in gpus.items()
            if other != one
        }
        unknown = statuses and all(status is None for status in statuses.values())
        readable = [k for k, status in statuses.items() if status == gpu.nvml.NVML_P2P_STATUS_OK]
        answer[one] = None if unknown else tuple(readable)
    return answer


def _nvlinks(gpu: Gpu) -> Counter[str]:
    """Return the number of active NVLinks to each PCI address, and to `SWITCH`."""
    count: Counter[str] = Counter()
    for link in range(gpu.nvml.NVML_NVLINK_MAX_LINKS):
        if gpu.get("NvLinkState", link) != gpu.nvml.NVML_FEATURE_ENABLED:
            continue
        if gpu.get("NvLinkRemoteDeviceType", link) == gpu.nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            count[SWITCH] += 1
        elif pci := gpu.get("NvLinkRemotePciInfo", link):
            count[pci_address(pci)] += 1
    return count


# The rates in NVIDIA's data sheets, with which `doctor --bench` compares.


@dataclass(frozen=True, slots=True)
class DataSheet:
    """A board's peak rates; None if its data sheet has none.

    Attributes:
        fp32: TFLOP/s of fp32 without tensor cores.
        tf32: Dense TFLOP/s of tensor cores with TF32.
        half: Dense TFLOP/s of tensor cores with fp16, accumulated in fp32 as torch does.
        bf16: Dense TFLOP/s of tensor cores with bf16.
        memory_gbs: Bandwidth of its memory in GB/s.
    """

    fp32: float
    tf32: float | None
    half: float
    bf16: float | None
    memory_gbs: float


# Boards by the driver's whole name: an A10G or a 3090 Ti is another board. If
# a data sheet lists a rate with sparsity only, the number here is half of it.
_BOARDS: tuple[tuple[str, DataSheet], ...] = (
    # Source: volta-v100-datasheet-update-us-1165301-r5.pdf.
    (r"Tesla V100-SXM2-\d+GB", DataSheet(15.7, None, 125, None, 900)),
    (r"Tesla V100-PCIE-\d+GB", DataSheet(14, None, 112, None, 900)),
    # Source: t4-tensor-core-datasheet-951643.pdf.
    (r"Tesla T4", DataSheet(8.1, None, 65, None, 300)),
    # Source: NVIDIA's data sheets of A10, A30 and A40.
    (r"NVIDIA A10", DataSheet(31.2, 62.5, 125, 125, 600)),
    (r"NVIDIA A30", DataSheet(10.3, 82, 165, 165, 933)),
    (r"NVIDIA A40", DataSheet(37.4, 74.8, 149.7, 149.7, 696)),
    # Source: nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf, and that of the 40 GB before it.
    (r"(NVIDIA )?A100-(SXM4|PCIE)-40GB", DataSheet(19.5, 156, 312, 312, 1555)),
    (r"(NVIDIA )?A100-SXM4-80GB", DataSheet(19.5, 156, 312, 312, 2039)),
    (r"NVIDIA A100 80GB PCIe", DataSheet(19.5, 156, 312, 312, 1935)),
    # Source: nvidia.com/en-us/data-center/l4 and l40s.
    (r"NVIDIA L4", DataSheet(30.3, 60, 121, 121, 300)),
    (r"NVIDIA L40S", DataSheet(91.6, 183, 362, 362, 864)),
    # Source: nvidia.com/en-us/data-center/h100; the data sheet had 67 TFLOP/s of fp32 for the NVL
    # before 2024, and the PCIe board in place of it.
    (r"NVIDIA H100 80GB HBM3", DataSheet(67, 494.5, 989.5, 989.5, 3350)),
    (r"NVIDIA H100 PCIe", DataSheet(51, 378, 756.5, 756.5, 2000)),
    (r"NVIDIA H100 NVL", DataSheet(60, 417.5, 835.5, 835.5, 3900)),
    # Source: nvidia.com/en-us/data-center/h200.
    (r"NVIDIA H200", DataSheet(67, 494.5, 989.5, 989.5, 4800)),
    (r"NVIDIA H200 NVL", DataSheet(60, 417.5, 835.5, 835.5, 4800)),
    # Source: nvidia.com/en-us/data-center/grace-hopper-superchip; 480GB is Grace's own memory.
    (r"NVIDIA GH200 480GB", DataSheet(67, 494, 990, 990, 4000)),
    # Source: nvidia.com/en-us/data-center/hgx, HGX B200 with 180 GB; the technical brief before it
    # had 80 TFLOP/s of fp32 and 8000 GB/s, as boards of the GB200 have.
    (r"NVIDIA B200", DataSheet(75, 1100, 2250, 2250, 7700)),
    # Source: NVIDIA Ampere GA102 GPU Architecture whitepaper V2, appendix A.
    (r"(NVIDIA )?GeForce RTX 3090", DataSheet(35.6, 35.6, 71, 71, 936)),
    # Source: NVIDIA Ada GPU Architecture whitepaper V2, appendix A.
    (r"NVIDIA GeForce RTX 4090", DataSheet(82.6, 82.6, 165.2, 165.2, 1008)),
    # Source: NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A.
    (r"NVIDIA GeForce RTX 5090", DataSheet(104.8, 104.8, 209.5, 209.5, 1792)),
)


def data_sheet(device: Device) -> DataSheet | None:
    """Return a board's data sheet; None for an unknown board or a MIG instance."""
    if device.kind != "cuda" or device.parent_uuid:
        return None
    found = (sheet for pattern, sheet in _BOARDS if re.fullmatch(pattern, device.name))
    return next(found, None)


# NVIDIA's Xid errors in the kernel's log since boot.


# The current state of NVIDIA's GPUs and MIG instances, read by NVML.


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
