"""AMD GPUs, read from the kernel's KFD topology in sysfs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from fasttrain.hardware.host import Host, Vendor, VendorReport
from fasttrain.hardware.runs import RunProcess, as_device_process
from fasttrain.hardware.tool import first_line
from fasttrain.hardware.vendors.kernel_files import numa_node, temperature_c
from fasttrain.model.machine import Device, DeviceProcess, DeviceState
from fasttrain.model.vendors import DeviceKind

NODES = "sys/class/kfd/kfd/topology/nodes"

# Heap types of memory banks on the GPU itself.
# Source: ROCT-Thunk-Interface hsakmttypes.h, HSA_HEAPTYPE_FRAME_BUFFER_PUBLIC and _PRIVATE.
GPU_HEAPS = ("1", "2")

# Matrix instructions with bf16 operands: CDNA from MI100 (MFMA), RDNA from RDNA3 (WMMA).
_BF16 = re.compile(r"gfx(908|90a|94\w|95\w|11\w+|12\w+)")


@dataclass(frozen=True, slots=True)
class Rocm:
    """AMD's probe."""

    host: Host
    kind: ClassVar[DeviceKind] = "rocm"

    def probe(self) -> VendorReport:
        """Return GPUs in the order of their KFD nodes, which is HIP's."""
        nodes = self.host.numbered(NODES, r"(\d+)")
        # Nodes without SIMD units are CPUs. Files of nodes that a container may not use are empty.
        gpus = [
            (node, values)
            for node in nodes
            if int((values := _properties(self.host, f"{node}/properties")).get("simd_count", 0))
        ]
        if not gpus:
            return VendorReport()
        if not self.host.exists("dev/kfd"):
            note = "AMD GPUs are here, but /dev/kfd is not: pass it into the container"
            return VendorReport(notes=(note,))
        devices = tuple(
            _device(self.host, index, *node_and_values)
            for index, node_and_values in enumerate(gpus)
        )
        return VendorReport(devices, first_line(self.host.read("sys/module/amdgpu/version")))

    def states(
        self, devices: Iterable[Device], runs: Mapping[int, RunProcess]
    ) -> tuple[DeviceState, ...]:
        """Return how its GPUs are."""
        return rocm_states(self.host, devices, runs)


def vendor(host: Host, _installed: Callable[[str], bool]) -> Vendor:
    """Return the probe."""
    return Rocm(host)


def _properties(host: Host, path: str) -> dict[str, str]:
    pairs = (line.split(maxsplit=1) for line in host.read(path).splitlines())
    return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}


def _device(host: Host, index: int, node: str, values: dict[str, str]) -> Device:
    target = gfx_name(int(values.get("gfx_target_version", 0)))
    minor = values.get("drm_render_minor", "")
    product = first_line(host.read(f"sys/class/drm/renderD{minor}/device/product_name"))
    unique = int(values.get("unique_id", 0))
    return Device(
        kind="rocm",
        index=index,
        name=product or f"AMD GPU {target}",
        uuid=f"GPU-{unique:016x}" if unique else "",
        memory_bytes=_memory_bytes(host, node),
        capability=target,
        bf16=bool(_BF16.fullmatch(target)),
        fp16=True,
    )


def gfx_name(version: int) -> str:
    """Return the compiler's name for a target version: ``gfx90a`` for 90010, which is 9.0.10."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _memory_bytes(host: Host, node: str) -> int:
    banks = [
        _properties(host, f"{bank}/properties")
        for bank in host.numbered(f"{node}/mem_banks", r"(\d+)")
    ]
    return sum(int(b.get("size_in_bytes", 0)) for b in banks if b.get("heap_type") in GPU_HEAPS)


# The current state of AMD's GPUs.


# A folder for each process that has opened /dev/kfd, with a file vram_<gpu_id> for each GPU.
# Source: Linux 6.12, drivers/gpu/drm/amd/amdkfd/kfd_process.c, kfd_procfs_add_sysfs_files.
PROCESSES = "sys/class/kfd/kfd/proc"


def rocm_states(
    host: Host, devices: Iterable[Device], runs: Mapping[int, RunProcess]
) -> tuple[DeviceState, ...]:
    """Return the states of a machine's AMD GPUs, in their order.

    The PCIe link is left out: on boards with their own switch, the kernel shows the link between
    switch and chip, not that to the slot.

    Source: Linux 6.12, Documentation/gpu/amdgpu: "Memory information", mem_info_vram_used;
    "HWMON Interfaces", temp1_input.
    """
    ours = [device for device in devices if device.kind == "rocm"]
    nodes = list(_gpu_nodes(host)) if ours else []
    if len(nodes) != len(ours):
        return ()
    return tuple(_state(host, device, node, runs) for device, node in zip(ours, nodes, strict=True))


def _gpu_nodes(host: Host) -> Iterator[str]:
    for node in host.numbered(NODES, r"(\d+)"):
        if int(_property(host, node, "simd_count") or 0):
            yield node


def _state(host: Host, device: Device, node: str, runs: Mapping[int, RunProcess]) -> DeviceState:
    folder = f"sys/class/drm/renderD{_property(host, node, 'drm_render_minor')}/device"
    return DeviceState(
        kind="rocm",
        index=device.index,
        uuid=device.uuid,
        temperature_c=temperature_c(host, folder, "temp1_input"),
        memory_used_bytes=host.number(f"{folder}/mem_info_vram_used"),
        processes=tuple(_processes(host, host.read(f"{node}/gpu_id").strip(), runs)),
        numa_node=numa_node(host, folder),
    )


def _processes(host: Host, gpu_id: str, runs: Mapping[int, RunProcess]) -> Iterator[DeviceProcess]:
    for folder in host.numbered(PROCESSES, r"(\d+)"):
        if used_bytes := host.number(f"{folder}/vram_{gpu_id}"):
            yield as_device_process(int(folder.rpartition("/")[2]), used_bytes, runs)


def _property(host: Host, node: str, name: str) -> str:
    found = re.search(rf"^{name} (\d+)$", host.read(f"{node}/properties"), re.MULTILINE)
    return found[1] if found else ""
