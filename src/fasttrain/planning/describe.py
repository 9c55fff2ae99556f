"""Phrases for reasons and errors, and the sources of decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from fasttrain.model.decision import Setting, Source, SourceKind
from fasttrain.model.machine import Device, Machine
from fasttrain.model.settings import Settings
from fasttrain.model.vendors import VENDORS, DeviceKind

NO_GPU = "no GPU"


def counted(number: int, noun: str) -> str:
    """Return ``1 GPU`` or ``2 GPUs``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def and_join(words: Iterable[str]) -> str:
    """Return ``a``, ``a and b`` or ``a, b and c``."""
    *head, last = words
    return f"{', '.join(head)} and {last}" if head else last


def device_names(devices: Iterable[Device]) -> str:
    """Return ``Tesla T4`` or ``2 x Tesla T4 and NVIDIA A100`` for one device or more."""
    names = Counter(device.name for device in devices)
    return and_join(name if n == 1 else f"{n} x {name}" for name, n in names.items())


def machine_phrase(machine: Machine) -> str:
    """Return a machine's devices and cores, such as ``no GPU, 2 CPU cores``."""
    there = device_names(machine.devices) if machine.devices else NO_GPU
    return f"{there}, {counted(machine.cpu.cores, 'CPU core')}"


def torch_phrase(machine: Machine) -> str:
    """Return ``torch 2.13.0`` or ``no torch installed``."""
    return f"torch {machine.torch.version}" if machine.torch.version else "no torch installed"


def release(version: tuple[int, int]) -> str:
    """Return a minimum version as ``torch 2.4``."""
    return f"torch {version[0]}.{version[1]}"


def kind_noun(kind: DeviceKind, number: int) -> str:
    """Return ``1 GPU`` or ``8 NPUs`` for a kind of device."""
    return counted(number, VENDORS[kind].noun)


EXACT = "results are to be bit for bit as without fasttrain (preset exact)"


def is_exact(settings: Settings) -> bool:
    """True if the preset ``exact`` has set an option."""
    named: list[Setting[object]] = [getattr(settings, field.name) for field in fields(settings)]
    presets = (one.source.where for one in named if one.source.kind is SourceKind.PRESET)
    return any("exact" in where for where in presets)


# Sources of decisions that are not the user's.


BUILT_IN = Source(SourceKind.DEFAULT, "default")
CPU_CORES = Source(SourceKind.MACHINE, "CPU cores")
DEVICES = Source(SourceKind.MACHINE, "devices")
SLURM = Source(SourceKind.MACHINE, "SLURM")
TORCH = Source(SourceKind.MACHINE, "torch")


NO_PYTHON = "no Python: fasttrain starts this command as it is"


def asked(setting: Setting[Any]) -> str:
    """Return the reason for a setting's value: the user's option, what tuned it, or the default."""
    if setting.source.kind is SourceKind.TUNED:
        return str(setting.source)
    return f"asked for by {setting.source}" if setting.source.explicit else "the default"
