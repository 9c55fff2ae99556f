"""Which devices a process would see, in which order, and how a variable names them.

A vendor's runtime may count devices in another order than its management library, by which
`Device.index` and ``--gpus`` count: CUDA puts the fastest GPU first unless CUDA_DEVICE_ORDER says
otherwise, NVML and nvidia-smi count by PCI bus.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fasttrain.model.machine import Device, Machine
from fasttrain.model.vendors import VENDORS, DeviceKind, Vendor


@dataclass(frozen=True, slots=True)
class Slot:
    """One visible device.

    Attributes:
        position: Its index for ``--gpus``, from 0.
        name: Its name in the visibility variable.
        device: The device.
    """

    position: int
    name: str
    device: Device


def visible_slots(
    machine: Machine, kind: DeviceKind, environ: Mapping[str, str]
) -> tuple[Slot, ...]:
    """Return the visible devices of one kind as ``--gpus`` counts them.

    They are in the order of the visibility variable; without one, in that of the probe.
    """
    vendor = VENDORS[kind]
    devices = [device for device in machine.devices if device.kind == kind]
    numbers = _numbers(devices, vendor, environ)
    below = environ.get(vendor.narrowed_first)
    if below is not None:
        devices = [device for _, device in _masked(devices, numbers, below)]
        numbers = dict(enumerate(devices))
    names = _words(vendor, environ)
    if names is not None:
        found = _masked(devices, numbers, names)
    elif below is not None:
        found = [(str(number), device) for number, device in numbers.items()]
    else:
        found = _unmasked(devices, by_uuid=not _counted_alike(devices, vendor, environ))
    return tuple(Slot(position, *pair) for position, pair in enumerate(found))


def as_seen(
    slots: Sequence[Slot], kind: DeviceKind, environ: Mapping[str, str]
) -> tuple[Slot, ...]:
    """Return visible devices in the order in which a process counts them, from ``cuda:0`` on.

    A MIG instance comes first: CUDA shows a process one of them, and no whole GPU with it.

    Source: NVIDIA MIG User Guide r570, "CUDA Device Enumeration".
    """
    vendor = VENDORS[kind]
    ordered = list(slots)
    if _words(vendor, environ) is None and not counts_by_bus(vendor, environ):
        ordered.sort(key=lambda slot: _slowness(slot.device))
    return tuple(sorted(ordered, key=lambda slot: not slot.device.parent_uuid))


def counts_by_bus(vendor: Vendor, environ: Mapping[str, str]) -> bool:
    """True if a vendor's runtime counts as its probe does."""
    if vendor.bus_order is None:
        return True
    variable, value = vendor.bus_order
    return environ.get(variable) == value


def repeated_mask(vendor: Vendor, environ: Mapping[str, str]) -> str:
    """Return the variable that repeats the list of the layer below, as SLURM writes it; else empty.

    For AMD's GPUs SLURM may set ROCR_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES to one list. HIP
    applies the second to what the first has left, so that 2,3 in both hides every GPU.

    Source: SLURM 26.11, gres.conf(5), "Flags", its last paragraph.
    """
    second = vendor.visibility_else
    if not second or vendor.visibility in environ or second not in environ:
        return ""
    return second if environ.get(vendor.narrowed_first) == environ[second] else ""


def with_uuid(devices: Sequence[Device], prefix: str) -> list[Device]:
    """Return the devices whose UUID has a prefix, ignoring case."""
    return [device for device in devices if device.uuid.lower().startswith(prefix.lower())]


def _words(vendor: Vendor, environ: Mapping[str, str]) -> str | None:
    """Return the value of the variable that the runtime reads; None where none is set."""
    if repeated_mask(vendor, environ):
        return None
    found = environ.get(vendor.visibility)
    return environ.get(vendor.visibility_else) if found is None else found


def _counted_alike(devices: list[Device], vendor: Vendor, environ: Mapping[str, str]) -> bool:
    """True if the runtime's index of each device is certain to be the probe's."""
    if vendor.bus_order is None:
        return True
    # A GPU that NVML has lost, or that is in MIG mode, may have no number in CUDA.
    gaps = [device.index for device in devices] != list(range(len(devices)))
    sliced = any(device.parent_uuid for device in devices)
    equal = len({device.name for device in devices}) < 2
    return not (gaps or sliced) and (equal or counts_by_bus(vendor, environ))


def _slowness(device: Device) -> tuple[int, int, int]:
    """Return the key that sorts GPUs as CUDA's FASTEST_FIRST may; its heuristic is not documented.

    Only GPUs of different compute capabilities get different plans, so their order matters most.

    Source: CUDA Programming Guide 13, "CUDA Environment Variables", CUDA_DEVICE_ORDER.
    """
    major, _, minor = device.capability.partition(".")
    numbers = (int(part) if part.isdecimal() else 0 for part in (major, minor))
    first, second = (-number for number in numbers)
    # The memory of a MIG instance says nothing of its GPU.
    return first, second, 0 if device.parent_uuid else -device.memory_bytes


def _numbers(
    devices: list[Device], vendor: Vendor, environ: Mapping[str, str]
) -> dict[int, Device]:
    """Return the devices by the numbers that name them in the first variable that applies.

    Instances of a GPU in MIG mode share its number, which names the first of them.
    """
    firsts = {device.index: device for device in reversed(devices)}
    if counts_by_bus(vendor, environ) or len({device.name for device in devices}) < 2:
        return firsts
    return dict(enumerate(sorted((firsts[index] for index in sorted(firsts)), key=_slowness)))


def _unmasked(devices: list[Device], *, by_uuid: bool) -> list[tuple[str, Device]]:
    uuids = by_uuid and all(device.uuid for device in devices)
    # A MIG instance has no index of its own: CUDA accepts only its UUID.
    return [
        (device.uuid if uuids or device.parent_uuid else str(device.index), device)
        for device in devices
    ]


def _masked(
    devices: list[Device], numbers: Mapping[int, Device], names: str
) -> list[tuple[str, Device]]:
    found: list[tuple[str, Device]] = []
    for name in (word.strip() for word in names.split(",")):
        device = _named(devices, numbers, name)
        if device is None:
            # CUDA ends the list at the first entry that names no device, such as -1.
            break
        if (device, _tile(name)) in [(other, _tile(word)) for word, other in found]:
            # CUDA and torch treat a list that names a device twice as empty.
            return []
        found.append((name, device))
    return found


def _tile(name: str) -> str:
    # Level Zero names the tiles of card 0 as 0.0 and 0.1.
    return name.partition(".")[2]


def _named(devices: list[Device], numbers: Mapping[int, Device], name: str) -> Device | None:
    whole, dot, tile = name.partition(".")
    if whole.isdecimal() and (tile.isdecimal() or not dot):
        return numbers.get(int(whole))
    matches = with_uuid(devices, name) if name else []
    return matches[0] if len(matches) == 1 else None
