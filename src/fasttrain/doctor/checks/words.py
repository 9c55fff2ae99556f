"""Words and figures that several checks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from textwrap import shorten

from fasttrain.doctor.check import Check, Judge, Mend
from fasttrain.model.examination import DeviceState, Examination
from fasttrain.model.machine import Device
from fasttrain.model.vendors import ACCELERATORS, VENDORS, DeviceKind
from fasttrain.planning.describe import and_join
from fasttrain.planning.visible import Slot, visible_slots

MIB, GIB = 2**20, 2**30

# A message of torch or a driver, quoted in a finding; the whole of it is in the --json output.
QUOTED_LENGTH = 160


def size(number_bytes: int) -> str:
    """Return ``64 MiB`` or ``1.5 GiB``."""
    if number_bytes < GIB:
        return f"{number_bytes // MIB} MiB"
    return f"{number_bytes / GIB:.1f}".removesuffix(".0") + " GiB"


def one_line(text: str) -> str:
    """Return a message without line breaks, and no longer than a finding can show."""
    return shorten(text, QUOTED_LENGTH, placeholder=" ...")


def spans(numbers: Iterable[int]) -> str:
    """Return numbers in order, each once, and three or more in a row as ``0-7``."""
    return ", ".join(
        f"{row[0]}-{row[-1]}" if len(row) > 2 else ", ".join(map(str, row))
        for row in _rows(sorted(set(numbers)))
    )


def _rows(numbers: list[int]) -> Iterator[list[int]]:
    row: list[int] = []
    for number in numbers:
        if row and number != row[-1] + 1:
            yield row
            row = []
        row.append(number)
    if row:
        yield row


def named(devices: Iterable[Device | DeviceState]) -> str:
    """Return ``GPU 0``, ``GPUs 0-7`` or ``GPU 0 and NPU 1``; the instances of a MIG GPU are one."""
    indices: dict[DeviceKind, set[int]] = {}
    for device in devices:
        indices.setdefault(device.kind, set()).add(device.index)
    return and_join(
        f"{VENDORS[kind].noun}{'s' if len(found) > 1 else ''} {spans(found)}"
        for kind, found in indices.items()
    )


def present(seen: Examination) -> tuple[DeviceKind, ...]:
    """Return the kinds of accelerators that this machine has, visible or not."""
    kinds = {device.kind for device in seen.machine.devices}
    return tuple(kind for kind in ACCELERATORS if kind in kinds)


def visible(seen: Examination, kind: DeviceKind) -> tuple[Slot, ...]:
    """Return the devices of a kind that a run started here would see, as their runtime counts.

    CUDA shows a process one MIG instance only, and hides every whole GPU beside it.

    Source: NVIDIA MIG User Guide, "CUDA Device Enumeration": "With CUDA 11/R450 and CUDA 12/R525,
    only enumeration of a single MIG instance is supported."
    """
    slots = visible_slots(seen.machine, kind, seen.environ)
    instances = [slot for slot in slots if slot.device.parent_uuid]
    return (instances[0],) if instances else slots


def most_visible(seen: Examination) -> int:
    """Return how many devices of one kind a run can use; 0 without accelerators."""
    return max((len(visible(seen, kind)) for kind in present(seen)), default=0)


def alike(devices: Sequence[Device]) -> list[int]:
    """Return the positions of those of one model: of the most frequent, or that of more memory."""
    models = {device.name: device for device in devices}
    names = [device.name for device in devices]
    chosen = max(models, key=lambda name: (names.count(name), models[name].memory_bytes))
    return [position for position, name in enumerate(names) if name == chosen]


def is_on(seen: Examination, variable: str) -> bool:
    """Return whether a switch of the environment is set to anything but 0."""
    return seen.environ.get(variable, "").strip() not in ("", "0")


# How a check is written down: a function that yields findings, under its slug.


def check(slug: str, about: str, mend: Mend | None = None) -> Callable[[Judge], Check]:
    """Return a decorator that makes a check of its judge, which then knows itself by its name."""

    def declare(judge: Judge) -> Check:
        return Check(slug, about, judge, mend)

    return declare
