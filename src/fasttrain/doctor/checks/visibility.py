"""Checks of the variables that choose devices, such as CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from fasttrain.doctor.checks.words import check, present
from fasttrain.model.examination import Examination, Finding
from fasttrain.model.vendors import VENDORS, DeviceKind
from fasttrain.planning.describe import kind_noun
from fasttrain.planning.visible import visible_slots

# What people write to hide every device on purpose; CUDA stops at any word that names none.
_NOTHING = frozenset({"", "-1", "NoDevFiles", "none"})


def _lists(seen: Examination) -> Iterator[tuple[DeviceKind, str, list[str]]]:
    """Give each kind of device with its variable and the words of that, where it is set."""
    for kind in present(seen):
        variable = VENDORS[kind].visibility
        if variable in seen.environ:
            words = [word.strip() for word in seen.environ[variable].split(",")]
            yield kind, variable, words


def _named_twice(words: list[str]) -> list[str]:
    return sorted({word for word in words if words.count(word) > 1})


def _malformed(kind: DeviceKind, value: str) -> bool:
    """Return whether Ascend's runtime would take a list for shorter than it is, or for empty."""
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


@check("visible-repeated", "whether a device is named twice")
def _repeated(seen: Examination) -> Iterator[Finding]:
    for kind, variable, words in _lists(seen):
        twice = _named_twice(words)
        if not twice or VENDORS[kind].ascending:
            continue
        once = ",".join(dict.fromkeys(words))
        yield _repeated.finding(
            "error",
            f"{variable}={','.join(words)} names {', '.join(twice)} twice",
            why="CUDA and torch take such a list for an empty one",
            fix=f"export {variable}={once}",
        )


@check("visible-unknown", "whether every device that is named exists")
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
            f"{variable} names {words[len(slots)]}, which is not there",
            why=f"the list ends at it, so {len(slots)} of {kind_noun(kind, there)} can be used",
            fix=f"export {variable}={known}" if known else f"unset {variable}",
        )


@check("visible-hidden", "whether devices are hidden from a run")
def _hidden(seen: Examination) -> Iterator[Finding]:
    for kind, variable, words in _lists(seen):
        there = sum(device.kind == kind for device in seen.machine.devices)
        slots = visible_slots(seen.machine, kind, seen.environ)
        everything = words[0] in _NOTHING
        # A job is given its devices by this variable, and one MIG instance is all that a process
        # can have; names that don't work are told elsewhere.
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
