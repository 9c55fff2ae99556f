"""A value together with why it was chosen and who chose it, and how an option declares its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SourceKind(StrEnum):
    """Where a value came from, strongest first."""

    FLAG = "flag"
    ENV = "env"
    FILE = "file"
    PRESET = "preset"
    TUNED = "tuned"
    DEFAULT = "default"
    MACHINE = "machine"


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a value.

    Attributes:
        kind: Layer that supplied it.
        where: Where a user can change it, or what it was derived from: ``--amp``,
            ``FASTTRAIN_AMP``, ``fasttrain.yaml:3``, ``preset exact``, a device name.
    """

    kind: SourceKind
    where: str

    @property
    def explicit(self) -> bool:
        """True if a person named this value, so that it must never be dropped silently."""
        return self.kind in (SourceKind.FLAG, SourceKind.ENV, SourceKind.FILE, SourceKind.PRESET)

    def __str__(self) -> str:
        return self.where or self.kind.value


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """The value of one option, and where it was set."""

    value: T
    source: Source


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """A value that fasttrain decided, the reason, and the source that settled it."""

    value: T
    reason: str
    source: Source


# Headings of --help under which options are listed.
DEVICES, LEVERS, PROCESSES, RUN = "Devices", "Levers", "Processes", "Run"


def option(
    default: Any,
    help: str,
    *,
    panel: str = "Run",
    metavar: str = "",
    minimum: int | None = None,
    maximum: int | None = None,
) -> Any:
    """Return a field that declares one option: its default, its help, and its limits.

    Args:
        default: Value if no layer names one.
        help: One line for ``--help``, the completions and the documentation.
        panel: Heading under which ``--help`` lists it.
        metavar: Placeholder for the value in ``--help``.
        minimum: Smallest integer allowed.
        maximum: Largest integer allowed.
    """
    return field(
        default=Setting(default, Source(SourceKind.DEFAULT, "default")),
        metadata={
            "help": help,
            "panel": panel,
            "metavar": metavar,
            "minimum": minimum,
            "maximum": maximum,
        },
    )
