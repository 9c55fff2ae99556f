"""AMD GPUs, by the kernel's KFD topology in sysfs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from fasttrain.hardware.host import Host, VendorReport
from fasttrain.hardware.tool import first_line
from fasttrain.model.machine import Device, DeviceKind

NODES = "sys/class/kfd/kfd/topology/nodes"

# Heap types of a memory bank that lies on the GPU itself.
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
        """Give GPUs in the order of their KFD nodes, which is HIP's."""
        nodes = self.host.numbered(NODES, r"(\d+)")
        # Nodes without SIMD units are CPUs; those that a container may not use read as empty.
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
    """Give the compiler's name of a target: 90010 is 9.0.10, written ``gfx90a``."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _memory_bytes(host: Host, node: str) -> int:
    banks = [
        _properties(host, f"{bank}/properties")
        for bank in host.numbered(f"{node}/mem_banks", r"(\d+)")
    ]
    return sum(int(b.get("size_in_bytes", 0)) for b in banks if b.get("heap_type") in GPU_HEAPS)
