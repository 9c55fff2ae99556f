"""How AMD's GPUs are at the moment, by the kernel's files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from fasttrain.hardware.host import Host
from fasttrain.hardware.orphans import RunProcess, as_device_process
from fasttrain.hardware.vendors.hwmon import temperature_c
from fasttrain.hardware.vendors.pci import numa_node
from fasttrain.hardware.vendors.rocm import NODES
from fasttrain.model.examination import DeviceProcess, DeviceState
from fasttrain.model.machine import Device

# One folder for each process that opened /dev/kfd, with a file vram_<gpu_id> for each GPU.
# Source: Linux 6.12, drivers/gpu/drm/amd/amdkfd/kfd_process.c, kfd_procfs_add_sysfs_files.
PROCESSES = "sys/class/kfd/kfd/proc"


def rocm_states(
    host: Host, devices: Iterable[Device], runs: Mapping[int, RunProcess]
) -> tuple[DeviceState, ...]:
    """Give the states of a machine's AMD GPUs, in their order.

    The PCIe link is left out: on boards with a switch of their own the kernel shows the link
    between that and the chip.

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
