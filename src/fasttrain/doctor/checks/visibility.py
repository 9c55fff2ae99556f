"""Checks of the variables that choose devices, such as CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from fasttrain.doctor.check import check
from fasttrain.doctor.checks.words import present
from fasttrain.model.examination import Examination, Finding
from fasttrain.model.vendors import VENDORS, DeviceKind
from fasttrain.planning.describe import kind_noun
from fasttrain.planning.visible import visible_slots

# Values that hide every device on purpose: CUDA stops at the first word that names no device.
_NOTHING = frozenset({"", "-1", "NoDevFiles", "none"})


def _lists(seen: Examination) -> Iterator[tuple[DeviceKind, str, list[str]]]:
    """Yield each kind of device whose variable is set, with the variable and its words."""
    for kind in present(seen):
        variable = VENDORS[kind].visibility
        if variable in seen.environ:
            words = [word.strip() for word in seen.environ[variable].split(",")]
            yield kind, variable, words


def _named_twice(words: list[str]) -> list[str]:
    return sorted({word for word in words if words.count(word) > 1})


def _malformed(kind: DeviceKind, value: str) -> bool:
    """True if Ascend's runtime would read fewer devices than a list names, or none."""
    if not VENDORS[kind].ascending or not value:
        return False
    if not re.fullmatch(r"\d+(,\d+)*", value):
        return True
    numbers = [int(word) for word in value.split(",")]
    return any(first >= second for first, second in pairwise(numbers))


@check("visible-ascending", "whether ASCEND_RT_VISIBLE_DEVICES is in ascending order")
def _ascending(seen: Examination) -> Iterator[Finding]:
    for kind, variable, words in _lists(seen):
        value = seen.environ[variable]
        if not _malformed(kind, value):
            continue
        numbers = sorted({int(word) for word in words if word.isdecimal()})
        fixed = ",".join(map(str, numbers)) or "0"
        yield _ascending.finding(
            "error",
            f"{variable}={value} is not a list of ascending numbers",
            # Source: CANN 8.5 and 9.1, "ASCEND_RT_VISIBLE_DEVICES": ascending order only; any other
            # character, a space too, ends the list. torch_npu 2.13.0 counts 0 for "1,0".
            why="torch_npu then sees fewer NPUs than it names, or none",
            fix=f"export {variable}={fixed}",
        )


@check("visible-repeated", "whether a device is listed twice")
def _repeated(seen: Examination) -> Iterator[Finding]:
    for kind, variable, words in _lists(seen):
        twice = _named_twice(words)
        if not twice or VENDORS[kind].ascending:
            continue
        once = ",".join(dict.fromkeys(words))
        yield _repeated.finding(
            "error",
            f"{variable}={','.join(words)} names {', '.join(twice)} twice",
            why="CUDA and torch treat such a list as empty",
            fix=f"export {variable}={once}",
        )


@check("visible-unknown", "whether every listed device exists")
def _unknown(seen: Examination) -> Iterator[Finding]:
    for kind, variable, words in _lists(seen):
        ignored = _named_twice(words) or _malformed(kind, seen.environ[variable])
        slots = visible_slots(seen.machine, kind, seen.environ)
        if ignored or len(slots) == len(words) or words[0] in _NOTHING:
            continue
        known = ",".join(words[: len(slots)])
        there = sum(device.kind == kind for device in seen.machine.devices)
        yield _unknown.finding(
            "warning" if slots else "error",
            f"{variable} names {words[len(slots)]}, which does not exist",
            why=f"the list ends there, so {len(slots)} of {kind_noun(kind, there)} can be used",
            fix=f"export {variable}={known}" if known else f"unset {variable}",
        )


@check("visible-hidden", "whether devices are hidden from a run")
def _hidden(seen: Examination) -> Iterator[Finding]:
    for kind, variable, words in _lists(seen):
        there = sum(device.kind == kind for device in seen.machine.devices)
        slots = visible_slots(seen.machine, kind, seen.environ)
        everything = words[0] in _NOTHING
        # SLURM sets the variable for its jobs, and a process can use one MIG instance only. Words
        # that name no device are findings of other checks.
        meant = seen.cluster.job or any(device.parent_uuid for device in seen.machine.devices)
        broken = _malformed(kind, seen.environ[variable])
        some = len(slots) == len(words) < there and not meant and not broken
        if everything or some:
            hidden = there - len(slots)
            yield _hidden.finding(
                "warning" if everything else "hint",
                f"{variable}={','.join(words)} hides {hidden} of {kind_noun(kind, there)}",
                why="a run trains on the CPU" if everything else "a run can't use them",
                fix=f"unset {variable}",
            )


CHECKS = (_ascending, _repeated, _unknown, _hidden)
