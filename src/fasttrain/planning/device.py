"""Decides the kind of device that the run trains on."""

from __future__ import annotations

from collections.abc import Mapping

from fasttrain.model.decision import Decision
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.machine import Machine
from fasttrain.model.settings import Settings
from fasttrain.model.vendors import ACCELERATORS, VENDORS, DeviceKind
from fasttrain.planning.describe import DEVICES, device_names, kind_noun, machine_phrase
from fasttrain.planning.visible import visible_slots


def decide_device(
    settings: Settings, machine: Machine, environ: Mapping[str, str]
) -> Decision[DeviceKind]:
    """Return the kind: the one asked for, else the machine's accelerators, else the CPU.

    Raises:
        FasttrainError: ``device-missing`` or ``torch-build`` when the kind that was asked for, or
            that --gpus needs, can't be had.
    """
    asked = settings.device.value
    if asked != "auto":
        return Decision(
            _demanded(asked, machine, environ),
            f"asked for by {settings.device.source}",
            settings.device.source,
        )
    present = [kind for kind in ACCELERATORS if _devices(machine, kind)]
    if settings.gpus.value is not None and present:
        # The GPUs were named, so falling back to the CPU would drop a request silently.
        kind = next((k for k in present if not wrong_build(machine, k)), present[0])
        _check_build(kind, machine)
        return _found(kind, machine)
    usable = (k for k in present if visible_slots(machine, k, environ))
    chosen = next((k for k in usable if not wrong_build(machine, k)), None)
    return _found(chosen, machine) if chosen else _on_cpu(present, machine)


def wrong_build(machine: Machine, kind: DeviceKind) -> bool:
    """Return whether the torch that is installed was built without this kind of device."""
    needed, build = VENDORS[kind].torch_build, machine.torch.build
    return bool(needed and build and build != needed)


def unusable_kinds(machine: Machine) -> tuple[DeviceKind, ...]:
    """Return the kinds of accelerators that are there but that this torch can't drive."""
    return tuple(k for k in ACCELERATORS if _devices(machine, k) and wrong_build(machine, k))


def build_fix(kind: DeviceKind) -> str:
    """Return what to do about a torch that was built for something else."""
    name = VENDORS[kind].build_name
    return f"install the {name} build of torch that pytorch.org/get-started names for your driver"


def _devices(machine: Machine, kind: DeviceKind) -> bool:
    return any(device.kind == kind for device in machine.devices)


def _found(kind: DeviceKind, machine: Machine) -> Decision[DeviceKind]:
    names = device_names(device for device in machine.devices if device.kind == kind)
    return Decision(kind, f"this machine has {names}", DEVICES)


def _on_cpu(present: list[DeviceKind], machine: Machine) -> Decision[DeviceKind]:
    reason = f"this machine has {machine_phrase(machine)}"
    if present and wrong_build(machine, present[0]):
        reason = f"torch {machine.torch.version} can't drive {device_names(machine.devices)}"
    elif present:
        reason = f"{VENDORS[present[0]].visibility} hides every {VENDORS[present[0]].noun}"
    return Decision("cpu", reason, DEVICES)


def _demanded(kind: DeviceKind, machine: Machine, environ: Mapping[str, str]) -> DeviceKind:
    if kind == "cpu":
        return kind
    if not _devices(machine, kind):
        raise FasttrainError(
            f"--device {kind} was asked for, but there is no such device",
            why=f"this machine has {machine_phrase(machine)}",
            fix="use --device auto; where there should be one, see that its driver lists it",
            slug="device-missing",
            exit_code=ExitCode.UNAVAILABLE,
        )
    _check_build(kind, machine)
    if not visible_slots(machine, kind, environ):
        variable = VENDORS[kind].visibility
        there = sum(device.kind == kind for device in machine.devices)
        raise FasttrainError(
            f"--device {kind} was asked for, but none is visible",
            why=f"{variable} hides {kind_noun(kind, there)}",
            fix=f"unset {variable}, or use --device auto",
            slug="device-missing",
            exit_code=ExitCode.UNAVAILABLE,
        )
    return kind


def _check_build(kind: DeviceKind, machine: Machine) -> None:
    if not wrong_build(machine, kind):
        return
    raise FasttrainError(
        f"torch can't use the {VENDORS[kind].noun}s of this machine",
        why=f"torch {machine.torch.version} is the {machine.torch.build} build, and there is "
        f"{device_names(device for device in machine.devices if device.kind == kind)}",
        fix=f"{build_fix(kind)}, or use --device cpu",
        slug="torch-build",
        exit_code=ExitCode.UNAVAILABLE,
    )
