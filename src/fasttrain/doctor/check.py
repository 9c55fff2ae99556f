"""A check of `fasttrain doctor`, and the decorator that declares one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import shorten

from fasttrain.model.machine import Device, DeviceState, Examination, Finding, Severity
from fasttrain.model.vendors import ACCELERATORS, VENDORS, DeviceKind
from fasttrain.planning.describe import and_join
from fasttrain.planning.visible import Slot, visible_slots

Mend = Callable[[Examination], str]
Judge = Callable[[Examination], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Check:
    """One question about a machine.

    Attributes:
        slug: Its stable name, for ``--only`` and ``--skip``.
        about: What it looks at, in one line, for ``--list``.
        judge: Yields findings; none if all is well or the answer is unknown.
        mend: Applies the finding's fix and returns what was done, in one line; None if the fix is
            not safe to apply for the user.
    """

    slug: str
    about: str
    judge: Judge
    mend: Mend | None = None

    def finding(
        self, severity: Severity, what: str, *, why: str, fix: str, where: str = ""
    ) -> Finding:
        """Return a finding of this check."""
        return Finding(self.slug, severity, what, why, fix, where, self.mend is not None)


def check(slug: str, about: str, mend: Mend | None = None) -> Callable[[Judge], Check]:
    """Return a decorator that turns a judge into a `Check`.

    The function's name then stands for the check, so the judge can make findings by it.
    """

    def declare(judge: Judge) -> Check:
        return Check(slug, about, judge, mend)

    return declare


# What several checks share: names, numbers, and which devices a run would see.


# Characters of a quoted message of torch or a driver; the --json output has all of it.
QUOTED_LENGTH = 160


def one_line(text: str) -> str:
    """Return a message in one line, shortened to `QUOTED_LENGTH`."""
    return shorten(text, QUOTED_LENGTH, placeholder=" ...")


def spans(numbers: Iterable[int]) -> str:
    """Return distinct numbers in ascending order; three or more in a row become ``0-7``."""
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
    """Return ``GPU 0``, ``GPUs 0-7`` or ``GPU 0 and NPU 1``; MIG instances count as their GPU."""
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
    """Return the devices of a kind that a run started here would see, in their runtime's order.

    With a MIG instance among them, CUDA shows only the first instance, and no whole GPU.

    Source: NVIDIA MIG User Guide, "CUDA Device Enumeration": "With CUDA 11/R450 and CUDA 12/R525,
    only enumeration of a single MIG instance is supported."
    """
    slots = visible_slots(seen.machine, kind, seen.environ)
    instances = [slot for slot in slots if slot.device.parent_uuid]
    return (instances[0],) if instances else slots


def most_visible(seen: Examination) -> int:
    """Return the number of devices of one kind that a run can use; 0 without accelerators."""
    return max((len(visible(seen, kind)) for kind in present(seen)), default=0)


def alike(devices: Sequence[Device]) -> list[int]:
    """Return the positions of the most frequent model; on a tie, of the one with more memory."""
    models = {device.name: device for device in devices}
    names = [device.name for device in devices]
    chosen = max(models, key=lambda name: (names.count(name), models[name].memory_bytes))
    return [position for position, name in enumerate(names) if name == chosen]


def is_on(seen: Examination, variable: str) -> bool:
    """True if a variable is set, and neither empty nor 0."""
    return seen.environ.get(variable, "").strip() not in ("", "0")
