"""How NVIDIA's GPUs reach each other: NVLink, PCIe and peer access, by NVML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Indices of nvmlDeviceGetP2PStatus. The binding's own NVML_P2P_CAPS_INDEX_READ is the tuple (0,),
# by a stray comma (nvidia-ml-py 13.615).
P2P_READ, P2P_NVLINK = 0, 2

SWITCH = "NVSwitch"

# Names of nvidia-smi topo -m for NVML's levels, from one bridge to another socket.
# Source: NVML API Reference 13.0, nvmlGpuTopologyLevel_t; nvidia-smi topo -h, 570.
LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device as NVML knows it; `handle` is None for one that can't be reached any more."""

    nvml: Any
    handle: Any

    def get(self, what: str, *args: Any) -> Any:
        """Give the answer of ``nvmlDeviceGet<what>``; None where board or driver has none."""
        if self.handle is None:
            return None
        try:
            return getattr(self.nvml, f"nvmlDeviceGet{what}")(self.handle, *args)
        # The second is what the binding raises when the driver is older than it.
        except (self.nvml.NVMLError, self.nvml.NVMLLibraryMismatchError):
            return None

    def address(self) -> str:
        """Give the PCI address without its function, such as ``0000:c1:00``; empty if unknown."""
        pci = self.get("PciInfo")
        return pci_address(pci) if pci else ""


def pci_address(pci: Any) -> str:
    """Give an nvmlPciInfo_t as the kernel writes it; NVML's own text has eight digits in front."""
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}"


def link_names(gpus: Mapping[int, Gpu]) -> dict[int, dict[str, str]]:
    """Give each GPU's way to each other, by their indices, as ``nvidia-smi topo -m`` names it."""
    nvlinks = {index: _nvlinks(gpu) for index, gpu in gpus.items()}
    addresses = {index: gpu.address() for index, gpu in gpus.items()}

    def name(one: int, other: int) -> str:
        status = gpus[one].get("P2PStatus", gpus[other].handle, P2P_NVLINK)
        # Through NVSwitch every GPU reaches every other by all of its links.
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
    """Give the GPUs whose memory each can read; None where the driver says nothing of any."""
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
    """Give the number of active NVLinks to each PCI address, and to `SWITCH`."""
    count: Counter[str] = Counter()
    for link in range(gpu.nvml.NVML_NVLINK_MAX_LINKS):
        if gpu.get("NvLinkState", link) != gpu.nvml.NVML_FEATURE_ENABLED:
            continue
        if gpu.get("NvLinkRemoteDeviceType", link) == gpu.nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            count[SWITCH] += 1
        elif pci := gpu.get("NvLinkRemotePciInfo", link):
            count[pci_address(pci)] += 1
    return count
