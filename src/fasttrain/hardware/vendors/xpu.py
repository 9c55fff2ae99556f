"""Intel's discrete GPUs, by PCI ids in sysfs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fasttrain.hardware.host import Host, VendorReport
from fasttrain.model.machine import Device, DeviceKind

INTEL = "0x8086"

# First digits of the PCI device ids. The graphics in Intel's processors are left out on purpose:
# nearly every laptop has them, and training there is rarely what its owner wants.
# Source: intel/compute-runtime of 2026, shared/source/dll/devices/devices_base.inl (PVC, DG2, BMG).
# All have matrix engines with bf16 and fp16.
NAMES = {
    "0x0bd": "Intel Data Center GPU Max",
    "0x0b69": "Intel Data Center GPU Max",
    "0x0b6e": "Intel Data Center GPU Max",
    "0x56c": "Intel Data Center GPU Flex",
    "0x569": "Intel Arc A-series (mobile)",
    "0x56a": "Intel Arc A-series",
    "0x56b": "Intel Arc Pro A-series",
    "0xe20": "Intel Arc B-series",
    "0xe21": "Intel Arc Pro B-series",
}


@dataclass(frozen=True, slots=True)
class Xpu:
    """Intel's probe."""

    host: Host
    kind: ClassVar[DeviceKind] = "xpu"

    def probe(self) -> VendorReport:
        """Give discrete GPUs in the order of the kernel's graphics cards; memory is unknown."""
        found = xpu_cards(self.host)
        if found and not self.host.numbered("dev/dri", r"renderD(\d+)"):
            note = "Intel GPUs are here, but /dev/dri is not: pass it into the container"
            return VendorReport(notes=(note,))
        return VendorReport(
            tuple(
                Device("xpu", index, name, bf16=True, fp16=True)
                for index, name in enumerate(found.values())
            )
        )


def xpu_cards(host: Host) -> dict[str, str]:
    """Give the folders of discrete GPUs in sysfs, in the kernel's order, with their names."""
    cards = host.numbered("sys/class/drm", r"card(\d+)")
    return {card: name for card in cards if (name := _name(host, card))}


def _name(host: Host, card: str) -> str:
    if host.read(f"{card}/device/vendor").strip() != INTEL:
        return ""
    device = host.read(f"{card}/device/device").strip().lower()
    return next((name for prefix, name in NAMES.items() if device.startswith(prefix)), "")
