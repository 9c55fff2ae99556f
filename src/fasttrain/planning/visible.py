"""Which devices a process would see now, and the word by which each is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fasttrain.model.machine import Device, Machine
from fasttrain.model.vendors import VENDORS, DeviceKind


@dataclass(frozen=True, slots=True)
class Slot:
    """One visible device.

    Attributes:
        position: Its index as the script counts, from 0.
        name: The word for it in the visibility variable.
        device: The device.
    """

    position: int
    name: str
    device: Device


def visible_slots(
    machine: Machine, kind: DeviceKind, environ: Mapping[str, str]
) -> tuple[Slot, ...]:
    """Return the devices of one kind that the environment lets through, in its order."""
    devices = [device for device in machine.devices if device.kind == kind]
    names = environ.get(VENDORS[kind].visibility)
    found = _unmasked(devices) if names is None else _masked(devices, names)
    return tuple(Slot(position, *pair) for position, pair in enumerate(found))


def with_uuid(devices: list[Device], prefix: str) -> list[Device]:
    """Return the devices whose UUID begins with the word; case does not matter."""
    return [device for device in devices if device.uuid.lower().startswith(prefix.lower())]


def _unmasked(devices: list[Device]) -> list[tuple[str, Device]]:
    # A MIG instance has no index of its own: CUDA takes its UUID only.
    return [
        (device.uuid if device.parent_uuid else str(device.index), device) for device in devices
    ]


def _masked(devices: list[Device], names: str) -> list[tuple[str, Device]]:
    found: list[tuple[str, Device]] = []
    for name in (word.strip() for word in names.split(",")):
        device = _named(devices, name)
        if device is None:
            # CUDA ends the list at the first entry that names no device, -1 included.
            break
        if (device, _tile(name)) in [(other, _tile(word)) for word, other in found]:
            # CUDA and torch take a list that names a device twice for an empty one.
            return []
        found.append((name, device))
    return found


def _tile(name: str) -> str:
    # Level Zero names the tiles of card 0 as 0.0 and 0.1.
    return name.partition(".")[2]


def _named(devices: list[Device], name: str) -> Device | None:
    whole, dot, tile = name.partition(".")
    if whole.isdecimal() and (tile.isdecimal() or not dot):
        return next((device for device in devices if device.index == int(whole)), None)
    matches = with_uuid(devices, name) if name else []
    return matches[0] if len(matches) == 1 else None
