"""Decides on which kind of device the run trains, and which of the visible devices it uses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from fasttrain.model.decision import Decision, Setting, Source
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.machine import Device, Machine
from fasttrain.model.settings import Settings
from fasttrain.model.vendors import ACCELERATORS, VENDORS, DeviceKind
from fasttrain.planning.describe import DEVICES, counted, device_names, kind_noun, machine_phrase
from fasttrain.planning.visible import (
    Slot,
    as_seen,
    counts_by_bus,
    visible_slots,
    with_uuid,
)

# Decides which of the visible devices the run uses.


# Seven digits are enough for any node, and not too many for int().
_INDEX = re.compile(r"[0-9]{1,7}")
_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]+", re.IGNORECASE)
_AUTO = re.compile(r"auto:([0-9]{1,7})")

IDLE_UNKNOWN = "idle or not"


@dataclass(frozen=True, slots=True)
class ChosenDevices:
    """The devices of a run.

    Attributes:
        kind: Their kind.
        names: Words for the visibility variable, in the order of the local ranks.
        slots: The devices that they name, in the same order.
        decision: The names with their reason.
        explicit: Whether --gpus named them.
        by_bus: Whether the names are numbers by PCI bus where the runtime counts otherwise.
        order: Why the first of them is the first that a process sees, as part of a reason.
    """

    kind: DeviceKind
    names: tuple[str, ...]
    slots: tuple[Slot, ...]
    decision: Decision[tuple[str, ...]]
    explicit: bool = False
    by_bus: bool = False
    order: str = ""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices themselves."""
        return tuple(slot.device for slot in self.slots)


def decide_gpus(
    setting: Setting[str | None], kind: DeviceKind, machine: Machine, environ: Mapping[str, str]
) -> ChosenDevices:
    """Return the visible devices that --gpus selects; without it, all of them.

    Without it, they are in the order in which a process counts them, which decides where a script
    that names no device trains.

    Raises:
        FasttrainError: ``gpus-syntax``, ``gpus-twice``, ``gpus-missing``, ``gpus-ambiguous``,
            ``gpus-none``, ``gpus-cpu`` or ``gpus-mig``.
    """
    slots = visible_slots(machine, kind, environ)
    if setting.value is None:
        return _all_visible(kind, as_seen(slots, kind, environ), environ)
    words = _words(setting.value)
    if kind == "cpu":
        raise _no_gpus(setting.value, machine)
    picked = _pick(words, kind, slots)
    if VENDORS[kind].ascending:
        picked = tuple(sorted(picked, key=lambda slot: slot.position))
    _check_mig(picked)
    names = _names(words, picked)
    reason = _reason(setting.value, words, kind, slots) + _by_uuid(kind, words, picked, environ)
    return ChosenDevices(
        kind,
        names,
        picked,
        Decision(names, reason, setting.source),
        explicit=True,
        by_bus=_by_bus(kind, slots, environ),
        order=f": {setting.source} names it first",
    )


def _all_visible(
    kind: DeviceKind, slots: tuple[Slot, ...], environ: Mapping[str, str]
) -> ChosenDevices:
    names = tuple(slot.name for slot in slots)
    decision = Decision(names, *_as_visible(kind, slots))
    by_bus = _by_bus(kind, slots, environ)
    return ChosenDevices(kind, names, slots, decision, by_bus=by_bus, order=_order(kind, environ))


def _by_bus(kind: DeviceKind, slots: tuple[Slot, ...], environ: Mapping[str, str]) -> bool:
    """True if numbers of the probe's name devices that the runtime counts otherwise."""
    vendor = VENDORS[kind]
    if vendor.visibility in environ or counts_by_bus(vendor, environ):
        return False
    differ = len({slot.device.name for slot in slots}) > 1
    return differ and all(slot.name.isdecimal() for slot in slots)


def _order(kind: DeviceKind, environ: Mapping[str, str]) -> str:
    vendor = VENDORS[kind]
    if vendor.visibility in environ:
        return f": {vendor.visibility} lists it first"
    if vendor.bus_order is None:
        return ""
    if counts_by_bus(vendor, environ):
        return f": {'='.join(vendor.bus_order)} counts by bus"
    return f": CUDA counts the fastest first, as {' is not '.join(vendor.bus_order)}"


def _by_uuid(
    kind: DeviceKind, words: tuple[str, ...], picked: tuple[Slot, ...], environ: Mapping[str, str]
) -> str:
    """Return why indices have become UUIDs, as part of a reason; empty if they haven't."""
    listed = VENDORS[kind].visibility in environ or all(_UUID.fullmatch(word) for word in words)
    if listed or any(slot.name != slot.device.uuid or slot.device.parent_uuid for slot in picked):
        return ""
    names = device_names(slot.device for slot in picked)
    return f": {names}, by UUID, as CUDA may count in another order than nvidia-smi"


def _as_visible(kind: DeviceKind, slots: tuple[Slot, ...]) -> tuple[str, Source]:
    if kind == "cpu":
        return "the run trains on the CPU", DEVICES
    return f"no --gpus: {kind_noun(kind, len(slots))} as visible to any process", DEVICES


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    if words == ("all",):
        return words
    auto = _AUTO.fullmatch(words[0]) if len(words) == 1 else None
    if auto and int(auto[1]) > 0:
        return words
    if all(_INDEX.fullmatch(word) or _UUID.fullmatch(word) for word in words):
        return words
    raise FasttrainError(
        f"--gpus {text!r} is not a list of GPUs",
        why="it takes 0,3 (indices, UUIDs or MIG ids), all, or auto:N with N from 1",
        fix="write it like --gpus 0,3",
        slug="gpus-syntax",
        exit_code=ExitCode.USAGE,
    )


def _no_gpus(text: str, machine: Machine) -> FasttrainError:
    if machine.devices:
        return FasttrainError(
            f"--gpus {text} contradicts --device cpu",
            why="a run on the CPU uses no GPU",
            fix="leave one of the two out",
            slug="gpus-cpu",
        )
    return FasttrainError(
        f"--gpus {text} was asked for, but there is none",
        why=f"this machine has {machine_phrase(machine)}",
        fix="leave --gpus out; if there should be GPUs, check that their driver lists them",
        slug="gpus-none",
        exit_code=ExitCode.UNAVAILABLE,
    )


def _pick(words: tuple[str, ...], kind: DeviceKind, slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
    if words == ("all",) and slots:
        return slots
    if auto := _AUTO.fullmatch(words[0]):
        count = int(auto[1])
        return slots[:count] if count <= len(slots) else _missing(words[0], kind, slots)
    picked = tuple(_find(word, kind, slots) for word in words)
    for word, slot in zip(words, picked, strict=True):
        if picked.count(slot) > 1:
            raise FasttrainError(
                f"--gpus names the same {VENDORS[kind].noun} twice: {word}",
                why=f"{word} is {slot.device.name}, index {slot.position}, as is another entry",
                fix="name each once; for several processes on one device use --nproc-per-node",
                slug="gpus-twice",
            )
    return picked


def _find(word: str, kind: DeviceKind, slots: tuple[Slot, ...]) -> Slot:
    if _INDEX.fullmatch(word):
        index = int(word)
        return slots[index] if index < len(slots) else _missing(word, kind, slots)
    matches = with_uuid([slot.device for slot in slots], word)
    if len(matches) > 1:
        raise FasttrainError(
            f"--gpus {word} fits {counted(len(matches), 'device')}",
            why=f"they are {', '.join(device.uuid for device in matches)}",
            fix="write more of the UUID",
            slug="gpus-ambiguous",
        )
    found = [slot for slot in slots if slot.device in matches]
    return found[0] if found else _missing(word, kind, slots)


def _missing(word: str, kind: DeviceKind, slots: tuple[Slot, ...]) -> NoReturn:
    variable = VENDORS[kind].visibility
    fix = f"use --gpus with indices from 0 to {len(slots) - 1}" if slots else f"unset {variable}"
    raise FasttrainError(
        f"--gpus {word} asks for more than there is",
        why=f"{kind_noun(kind, len(slots))} visible"
        + "".join(f"; {slot.position} is {slot.device.name}" for slot in slots),
        fix=fix,
        slug="gpus-missing",
        exit_code=ExitCode.UNAVAILABLE,
    )


def _check_mig(picked: tuple[Slot, ...]) -> None:
    # Source: NVIDIA MIG User Guide r570, "CUDA Device Enumeration".
    if len(picked) > 1 and any(slot.device.parent_uuid for slot in picked):
        raise FasttrainError(
            f"--gpus picks {counted(len(picked), 'device')}, MIG instances among them",
            why="CUDA shows a process one MIG instance only, and no whole GPU with it",
            fix="name one MIG instance for each run",
            slug="gpus-mig",
        )


def _names(words: tuple[str, ...], picked: tuple[Slot, ...]) -> tuple[str, ...]:
    names = tuple(slot.name for slot in picked)
    uuids = tuple(slot.device.uuid for slot in picked)
    by_uuid = all(_UUID.fullmatch(word) for word in words)
    mixed = len({name.replace(".", "").isdecimal() for name in names}) > 1
    # A list can't mix indices and UUIDs: drivers and torch stop reading where the form changes.
    return uuids if (by_uuid or mixed) and all(uuids) else names


def _reason(text: str, words: tuple[str, ...], kind: DeviceKind, slots: tuple[Slot, ...]) -> str:
    visible = f"{kind_noun(kind, len(slots))} visible"
    if _AUTO.fullmatch(words[0]):
        return f"the first of {visible}, {IDLE_UNKNOWN}"
    if VENDORS[kind].ascending and len(words) > 1:
        return f"{text} of {visible}, sorted: {VENDORS[kind].visibility} takes ascending ids only"
    return f"{text} of {visible}"


# Decides on which kind of device the run trains.


def decide_device(
    settings: Settings, machine: Machine, environ: Mapping[str, str]
) -> Decision[DeviceKind]:
    """Return the kind that was asked for, else the machine's accelerators, else the CPU.

    Raises:
        FasttrainError: ``device-missing`` or ``torch-build`` if the kind that was asked for, or
            that --gpus needs, can't be used.
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
        # The user asked for GPUs, so an error is better than a silent run on the CPU.
        kind = next((k for k in present if not wrong_build(machine, k)), present[0])
        _check_build(kind, machine)
        return _found(kind, machine)
    # A hidden kind is skipped, so hiding all GPUs of one vendor makes a run use another's.
    usable = (k for k in present if visible_slots(machine, k, environ))
    chosen = next((k for k in usable if not wrong_build(machine, k)), None)
    return _found(chosen, machine) if chosen else _on_cpu(present, machine)


def wrong_build(machine: Machine, kind: DeviceKind) -> bool:
    """True if the installed torch was built without support for a kind of device."""
    needed, build = VENDORS[kind].torch_build, machine.torch.build
    return bool(needed and build and build != needed)


def unusable_kinds(machine: Machine) -> tuple[DeviceKind, ...]:
    """Return the kinds of accelerators that this machine has and its torch can't use."""
    return tuple(k for k in ACCELERATORS if _devices(machine, k) and wrong_build(machine, k))


def build_fix(kind: DeviceKind) -> str:
    """Return the fix for a torch that was built for another kind of device."""
    name = VENDORS[kind].build_name
    return f"install the {name} build of torch that pytorch.org/get-started lists for your driver"


def _devices(machine: Machine, kind: DeviceKind) -> bool:
    return any(device.kind == kind for device in machine.devices)


def _found(kind: DeviceKind, machine: Machine) -> Decision[DeviceKind]:
    names = device_names(device for device in machine.devices if device.kind == kind)
    return Decision(kind, f"this machine has {names}", DEVICES)


def _on_cpu(present: list[DeviceKind], machine: Machine) -> Decision[DeviceKind]:
    reason = f"this machine has {machine_phrase(machine)}"
    if present and wrong_build(machine, present[0]):
        reason = f"torch {machine.torch.version} can't use {device_names(machine.devices)}"
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
            fix="use --device auto; if there should be one, check that its driver lists it",
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
        why=f"torch {machine.torch.version} is the {machine.torch.build} build; this machine has "
        f"{device_names(device for device in machine.devices if device.kind == kind)}",
        fix=f"{build_fix(kind)}, or use --device cpu",
        slug="torch-build",
        exit_code=ExitCode.UNAVAILABLE,
    )
