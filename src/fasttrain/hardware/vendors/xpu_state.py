"""How Intel's GPUs are at the moment, by the files of the drivers i915 and xe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from fasttrain.hardware.host import Host
from fasttrain.hardware.orphans import RunProcess, as_device_process
from fasttrain.hardware.vendors.hwmon import read_sensor, temperature_c
from fasttrain.hardware.vendors.kernel_files import drm_clients
from fasttrain.hardware.vendors.pci import numa_node
from fasttrain.hardware.vendors.xpu import xpu_cards
from fasttrain.model.examination import DeviceProcess, DeviceState
from fasttrain.model.machine import Device

# Names of the reasons for which a chip's clock is held down; each is a file that holds 0 or 1.
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
    """Give the states of a machine's Intel GPUs, in their order.

    How much of the memory is in use isn't told: these drivers tell it of a user's own processes
    alone. The PCIe link is left out, because boards have a switch of their own.
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
    """Give a power limit in watts; None where there is none, which the drivers write as 0.

    Source: Linux 6.15, Documentation/ABI/testing/sysfs-driver-intel-xe-hwmon and
    sysfs-driver-intel-i915-hwmon: microwatts.
    """
    microwatts = read_sensor(host, f"{card}/device", name)
    return microwatts / 1e6 if microwatts else None


def _with_runs(
    processes: Iterable[DeviceProcess], runs: Mapping[int, RunProcess]
) -> Iterator[DeviceProcess]:
    for told in processes:
        known = as_device_process(told.pid, told.memory_bytes, runs)
        yield DeviceProcess(
            known.pid, known.memory_bytes, known.command, known.run, known.orphan, told.display
        )
