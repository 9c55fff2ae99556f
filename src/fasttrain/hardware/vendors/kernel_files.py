"""Which of the user's processes hold memory of a GPU, by what the kernel says of their files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from fasttrain.hardware.host import Host
from fasttrain.model.examination import DeviceProcess

# Regions that lie on the GPU: vram0 with xe, local0 with i915.
_REGION = re.compile(r"drm-resident-(vram|local)\d+")
# Time of the engines that only compute: xe's in cycles, i915's in nanoseconds.
_COMPUTING = ("drm-cycles-ccs", "drm-engine-compute")
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20}


def drm_clients(host: Host) -> dict[str, list[DeviceProcess]]:
    """Give the processes that hold memory of each GPU, by its PCI address.

    The files of other users' processes are closed, and theirs are not among them. A process that
    has never computed on the GPU draws on it.

    Source: Linux 6.15, Documentation/gpu/drm-usage-stats.rst, and the examples of
    drivers/gpu/drm/xe/xe_drm_client.c.
    """
    found: dict[str, list[DeviceProcess]] = {}
    for folder in host.numbered("proc", r"(\d+)"):
        for address, clients in _clients(host, f"{folder}/fdinfo").items():
            held = sum(map(_resident_bytes, clients))
            draws = not any(_number(told.get(key, "")) for told in clients for key in _COMPUTING)
            if held:
                process = DeviceProcess(int(folder.rpartition("/")[2]), held, display=draws)
                found.setdefault(address, []).append(process)
    return found


def _clients(host: Host, folder: str) -> dict[str, list[Mapping[str, str]]]:
    """Give what is told of each client of a process, by GPU; one may have several files open."""
    once: dict[tuple[str, str], Mapping[str, str]] = {}
    for told in _told(host, folder):
        once[told.get("drm-pdev", ""), told["drm-client-id"]] = told
    found: dict[str, list[Mapping[str, str]]] = {}
    for (address, _), told in once.items():
        found.setdefault(address, []).append(told)
    return found


def _told(host: Host, folder: str) -> Iterator[Mapping[str, str]]:
    for name in host.names(folder):
        lines = host.read(f"{folder}/{name}").splitlines()
        told = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
        if "drm-client-id" in told:
            yield told


def _resident_bytes(told: Mapping[str, str]) -> int:
    return sum(_number(value) for key, value in told.items() if _REGION.fullmatch(key))


def _number(text: str) -> int:
    """Give a number in its unit, such as ``512 KiB``; cycles and nanoseconds as they are."""
    number, _, unit = text.partition(" ")
    return int(number) * _UNITS.get(unit, 1) if number.isdecimal() else 0
