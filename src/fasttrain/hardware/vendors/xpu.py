"""Intel's discrete GPUs, found by PCI ids in sysfs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from fasttrain.hardware.host import Host, Vendor, VendorReport
from fasttrain.hardware.runs import RunProcess, as_device_process
from fasttrain.hardware.vendors.kernel_files import (
    drm_clients,
    numa_node,
    read_sensor,
    temperature_c,
)
from fasttrain.model.machine import Device, DeviceProcess, DeviceState
from fasttrain.model.vendors import DeviceKind

INTEL = "0x8086"

# First digits of the PCI device ids. Graphics in Intel's processors are left out on purpose: nearly
# every laptop has them, and few people want to train on them.
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
        """Return discrete GPUs in the order of the kernel's graphics cards; memory is unknown."""
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

    def states(
        self, devices: Iterable[Device], runs: Mapping[int, RunProcess]
    ) -> tuple[DeviceState, ...]:
        """Return how its GPUs are."""
        return xpu_states(self.host, devices, runs)


def vendor(host: Host, _installed: Callable[[str], bool]) -> Vendor:
    """Return the probe."""
    return Xpu(host)


def xpu_cards(host: Host) -> dict[str, str]:
    """Return names of discrete GPUs by their folders in sysfs, in the kernel's order."""
    cards = host.numbered("sys/class/drm", r"card(\d+)")
    return {card: name for card in cards if (name := _name(host, card))}


def _name(host: Host, card: str) -> str:
    if host.read(f"{card}/device/vendor").strip() != INTEL:
        return ""
    device = host.read(f"{card}/device/device").strip().lower()
    return next((name for prefix, name in NAMES.items() if device.startswith(prefix)), "")


# The current state of Intel's GPUs, from the files of the drivers i915 and xe.


# Reasons for which a chip is throttled; each name is part of a file that holds 0 or 1.
# Source: Linux 6.12, drivers/gpu/drm/xe/xe_gt_throttle.c, "Xe GT Throttle", and
# drivers/gpu/drm/i915/gt/intel_gt_sysfs_pm.c.
THROTTLING = {
    "power": ("pl1", "pl2", "pl4"),
    "thermal": ("thermal", "ratl", "vr_thermalert"),
    "hardware": ("prochot", "vr_tdc"),
}


def xpu_states(
    host: Host, devices: Iterable[Device], runs: Mapping[int, RunProcess]
) -> tuple[DeviceState, ...]:
    """Return the states of a machine's Intel GPUs, in their order.

    The memory in use is left out, because these drivers report it for the user's own processes
    only. The PCIe link is left out, because the boards have their own switch.
    """
    ours = [device for device in devices if device.kind == "xpu"]
    cards = list(xpu_cards(host)) if ours else []
    if len(cards) != len(ours):
        return ()
    processes = drm_clients(host) if ours else {}

    def state(device: Device, card: str) -> DeviceState:
        address = _pci_address(host, card)
        return DeviceState(
            kind="xpu",
            index=device.index,
            processes=tuple(_with_runs(processes.get(address, ()), runs)),
            throttled=tuple(_throttled(host, card)),
            power_limit_w=_watts(host, card, "power1_max"),
            power_default_w=_watts(host, card, "power1_rated_max"),
            # Source: Linux 6.15, Documentation/ABI/testing/sysfs-driver-intel-xe-hwmon.
            temperature_c=temperature_c(host, f"{card}/device", "temp2_input"),
            numa_node=numa_node(host, f"{card}/device"),
        )

    return tuple(state(device, card) for device, card in zip(ours, cards, strict=True))


def _pci_address(host: Host, card: str) -> str:
    found = re.search(r"^PCI_SLOT_NAME=(\S+)$", host.read(f"{card}/device/uevent"), re.MULTILINE)
    return found[1] if found else ""


def _throttled(host: Host, card: str) -> Iterator[str]:
    tiles = host.numbered(f"{card}/device", r"tile(\d+)")
    parts = [part for tile in tiles for part in host.numbered(tile, r"gt(\d+)")]
    xe = [f"{part}/freq0/throttle/reason_" for part in parts]
    i915 = [f"{part}/throttle_reason_" for part in host.numbered(f"{card}/gt", r"gt(\d+)")]
    for name, reasons in THROTTLING.items():
        if any(host.number(file + reason) for file in (*xe, *i915) for reason in reasons):
            yield name


def _watts(host: Host, card: str, name: str) -> float | None:
    """Return a power limit in watts; None for 0, which the drivers write for no limit.

    Source: Linux 6.15, Documentation/ABI/testing/sysfs-driver-intel-xe-hwmon and
    sysfs-driver-intel-i915-hwmon: microwatts.
    """
    microwatts = read_sensor(host, f"{card}/device", name)
    return microwatts / 1e6 if microwatts else None


def _with_runs(
    processes: Iterable[DeviceProcess], runs: Mapping[int, RunProcess]
) -> Iterator[DeviceProcess]:
    for process in processes:
        known = as_device_process(process.pid, process.memory_bytes, runs)
        yield DeviceProcess(
            known.pid, known.memory_bytes, known.command, known.run, known.orphan, process.display
        )
