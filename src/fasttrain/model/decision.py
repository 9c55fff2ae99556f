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
