"""A machine in a few words, for error texts."""

from __future__ import annotations

from collections import Counter

from fasttrain.model.machine import Machine


def describe(machine: Machine) -> str:
    """Give the accelerators in one phrase: ``8 x NVIDIA H100 80GB HBM3``, ``no GPU, 2 CPU cores``.

    Devices of one name are counted together, in the order in which the names first appear.
    """
    names = Counter(device.name for device in machine.devices)
    if names:
        return ", ".join(f"{count} x {name}" for name, count in names.items())
    cores = machine.cpu.cores
    return f"no GPU, {cores} CPU core{'' if cores == 1 else 's'}"
