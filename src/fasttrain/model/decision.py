"""A value together with why it was chosen and who chose it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

T = TypeVar("T")


class SourceKind(StrEnum):
    """Where a value came from, strongest first."""

    FLAG = "flag"
    ENV = "env"
    FILE = "file"
    PRESET = "preset"
    DEFAULT = "default"
    MACHINE = "machine"


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a value.

    Attributes:
        kind: Layer that supplied it.
        where: The place a user can go and change it: ``--amp``, ``FASTTRAIN_AMP``,
            ``fasttrain.yaml:3``, ``preset exact``, a device name.
    """

    kind: SourceKind
    where: str

    @property
    def explicit(self) -> bool:
        """Return whether a person named this value, so that it must never be dropped silently."""
        return self.kind in (SourceKind.FLAG, SourceKind.ENV, SourceKind.FILE, SourceKind.PRESET)

    def __str__(self) -> str:
        return self.where or self.kind.value


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """What the user wants for one option, and where they said so."""

    value: T
    source: Source


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """What fasttrain decided, why, and which source had the last word."""

    value: T
    reason: str
    source: Source
