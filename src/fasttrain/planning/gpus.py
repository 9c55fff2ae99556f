"""Decides which devices the run is given, from --gpus and what is visible already."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from fasttrain.model.decision import Decision, Setting, Source
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.machine import Device, Machine
from fasttrain.model.vendors import VENDORS, DeviceKind
from fasttrain.planning.describe import DEVICES, counted, kind_noun, machine_phrase
from fasttrain.planning.visible import Slot, with_uuid

# Seven digits are more devices than a node can have, and few enough to read as an int.
_INDEX = re.compile(r"[0-9]{1,7}")
_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]+", re.IGNORECASE)
_AUTO = re.compile(r"auto:([0-9]{1,7})")

IDLE_UNKNOWN = "which ones are idle is not looked at"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The devices of a run.

    Attributes:
        kind: Their kind.
        names: Words for the visibility variable, in the order of the local ranks.
        slots: The devices behind them, in the same order.
        decision: The names with their reason.
        explicit: Whether --gpus named them.
    """

    kind: DeviceKind
    names: tuple[str, ...]
    slots: tuple[Slot, ...]
    decision: Decision[tuple[str, ...]]
    explicit: bool = False

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices themselves."""
        return tuple(slot.device for slot in self.slots)


def decide_gpus(
    setting: Setting[str | None], kind: DeviceKind, slots: tuple[Slot, ...], machine: Machine
) -> Chosen:
    """Return the devices that --gpus picks among the visible ones; without it, all of those.

    Raises:
        FasttrainError: ``gpus-syntax``, ``gpus-twice``, ``gpus-missing``, ``gpus-ambiguous``,
            ``gpus-none``, ``gpus-cpu`` or ``gpus-mig``.
    """
    if setting.value is None:
        names = tuple(slot.name for slot in slots)
        return Chosen(kind, names, slots, Decision(names, *_as_visible(kind, slots)))
    words = _words(setting.value)
    if kind == "cpu":
        raise _no_gpus(setting.value, machine)
    picked = _pick(words, kind, slots)
    if VENDORS[kind].ascending:
        picked = tuple(sorted(picked, key=lambda slot: slot.position))
    _check_mig(picked)
    names = _names(words, picked)
    reason = _reason(setting.value, words, kind, slots)
    return Chosen(kind, names, picked, Decision(names, reason, setting.source), explicit=True)


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
        fix="leave --gpus out; where there should be GPUs, see that their driver lists them",
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
            why="CUDA shows a process one MIG instance only, and hides every whole GPU beside it",
            fix="name one MIG instance for each run",
            slug="gpus-mig",
        )


def _names(words: tuple[str, ...], picked: tuple[Slot, ...]) -> tuple[str, ...]:
    names = tuple(slot.name for slot in picked)
    uuids = tuple(slot.device.uuid for slot in picked)
    by_uuid = all(_UUID.fullmatch(word) for word in words)
    mixed = len({name.replace(".", "").isdecimal() for name in names}) > 1
    # One list can't mix indices with UUIDs: drivers and torch stop reading where the form changes.
    return uuids if (by_uuid or mixed) and all(uuids) else names


def _reason(text: str, words: tuple[str, ...], kind: DeviceKind, slots: tuple[Slot, ...]) -> str:
    visible = f"{kind_noun(kind, len(slots))} visible"
    if _AUTO.fullmatch(words[0]):
        return f"the first of {visible}; {IDLE_UNKNOWN}"
    if VENDORS[kind].ascending and len(words) > 1:
        return f"{text} of {visible}, sorted: {VENDORS[kind].visibility} takes ascending ids only"
    return f"{text} of {visible}"
