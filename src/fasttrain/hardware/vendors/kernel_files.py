"""Facts about devices in the kernel's files: users of memory, sensors, NUMA nodes, and RDMA."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from fasttrain.hardware.host import Host
from fasttrain.model.machine import DeviceProcess, RdmaPort

# Memory regions on the GPU: vram0 with xe, local0 with i915.
_REGION = re.compile(r"drm-resident-(vram|local)\d+")
# Time used by compute engines: in cycles with xe, in nanoseconds with i915.
_COMPUTING = ("drm-cycles-ccs", "drm-engine-compute")
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20}


def drm_clients(host: Host) -> dict[str, list[DeviceProcess]]:
    """Return the processes that hold memory of each GPU, by its PCI address.

    Processes of other users are missing, because their files can't be read. A process without
    compute time counts as a display.

    Source: Linux 6.15, Documentation/gpu/drm-usage-stats.rst, and the examples of
    drivers/gpu/drm/xe/xe_drm_client.c.
    """
    found: dict[str, list[DeviceProcess]] = {}
    for folder in host.numbered("proc", r"(\d+)"):
        for address, clients in _clients(host, f"{folder}/fdinfo").items():
            held = sum(map(_resident_bytes, clients))
            draws = not any(_number(stats.get(key, "")) for stats in clients for key in _COMPUTING)
            if held:
                process = DeviceProcess(int(folder.rpartition("/")[2]), held, display=draws)
                found.setdefault(address, []).append(process)
    return found


def _clients(host: Host, folder: str) -> dict[str, list[Mapping[str, str]]]:
    """Return the statistics of a process's DRM clients, by the GPU's PCI address."""
    # By client id, because a client with several open files appears once for each of them.
    once: dict[tuple[str, str], Mapping[str, str]] = {}
    for stats in _drm_stats(host, folder):
        once[stats.get("drm-pdev", ""), stats["drm-client-id"]] = stats
    found: dict[str, list[Mapping[str, str]]] = {}
    for (address, _), stats in once.items():
        found.setdefault(address, []).append(stats)
    return found


def _drm_stats(host: Host, folder: str) -> Iterator[Mapping[str, str]]:
    for name in host.names(folder):
        lines = host.read(f"{folder}/{name}").splitlines()
        stats = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
        if "drm-client-id" in stats:
            yield stats


def _resident_bytes(stats: Mapping[str, str]) -> int:
    return sum(_number(value) for key, value in stats.items() if _REGION.fullmatch(key))


def _number(text: str) -> int:
    """Return a number with its unit applied, such as ``512 KiB``; other units count as 1."""
    number, _, unit = text.partition(" ")
    return int(number) * _UNITS.get(unit, 1) if number.isdecimal() else 0


# A device's sensors, in the hwmon folders below it.


def read_sensor(host: Host, device: str, name: str) -> int | None:
    """Return a sensor's number as the kernel writes it; None if the device has no such sensor.

    Args:
        host: The machine.
        device: The device's folder in sysfs.
        name: The file, such as ``power1_max`` (microwatts) or ``temp1_input`` (millidegrees).
    """
    folders = host.numbered(f"{device}/hwmon", r"hwmon(\d+)")
    found = (host.number(f"{folder}/{name}") for folder in folders)
    return next((number for number in found if number is not None), None)


def temperature_c(host: Host, device: str, name: str) -> float | None:
    """Return a temperature in degrees Celsius.

    Source: Linux 6.12, Documentation/hwmon/sysfs-interface.rst: millidegree Celsius.
    """
    millidegrees = read_sensor(host, device, name)
    return None if millidegrees is None else millidegrees / 1000


# The place of a PCI device, in sysfs.


def numa_node(host: Host, folder: str) -> int | None:
    """Return a device's NUMA node; None if the firmware names none, which sysfs shows as -1."""
    return host.number(f"{folder}/numa_node")


def pci_folder(address: str) -> str:
    """Return the folder of a PCI function such as ``0000:C1:00.0``."""
    return f"sys/bus/pci/devices/{address.lower()}"


# Ports of InfiniBand and RoCE adapters, in sysfs.


FOLDER = "sys/class/infiniband"


def rdma_ports(host: Host) -> tuple[RdmaPort, ...]:
    """Return the ports of all InfiniBand and RoCE adapters.

    Source: Linux 6.12, Documentation/ABI/stable/sysfs-class-infiniband, and what
    drivers/infiniband/core/sysfs.c writes: ``4: ACTIVE``, ``100 Gb/sec (4X EDR)``.
    """
    return tuple(
        _port(host, adapter, number)
        for adapter in host.names(FOLDER)
        for number in host.names(f"{FOLDER}/{adapter}/ports")
    )


def _port(host: Host, adapter: str, number: str) -> RdmaPort:
    folder = f"{FOLDER}/{adapter}/ports/{number}"
    rate = re.match(r"([\d.]+) Gb/sec", host.read(f"{folder}/rate"))
    return RdmaPort(
        name=f"{adapter}/{number}",
        state=host.read(f"{folder}/state").partition(":")[2].strip(),
        link_layer=host.read(f"{folder}/link_layer").strip(),
        rate_gbps=float(rate[1]) if rate else None,
    )
