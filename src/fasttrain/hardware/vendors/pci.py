"""Where a PCI device hangs, by sysfs."""

from __future__ import annotations

from fasttrain.hardware.host import Host


def numa_node(host: Host, folder: str) -> int | None:
    """Give the NUMA node of a device's folder in sysfs; None where the firmware names none (-1)."""
    return host.number(f"{folder}/numa_node")


def pci_folder(address: str) -> str:
    """Give the folder of a PCI function such as ``0000:C1:00.0``."""
    return f"sys/bus/pci/devices/{address.lower()}"
