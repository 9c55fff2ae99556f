"""What the launchers of several nodes know of one hang: a run hangs only where all of it does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from fasttrain.launch.hang.verdict import verdict
from fasttrain.model.hang import Hang


class Nodes(Protocol):
    """Where the launcher of each node says what it finds.

    Attributes:
        see_each_other: Whether the launchers of all nodes meet here.
    """

    see_each_other: bool

    def say(self, found: Hang | None) -> None:
        """Say that nothing goes on here, or by None that something does again."""

    def said(self) -> tuple[Hang, ...]:
        """Give what all nodes have found, this one's too; empty while one of them goes on."""


class OneNode:
    """A launcher that hears of no other."""

    see_each_other = False

    def __init__(self) -> None:
        self._found: Hang | None = None

    def say(self, found: Hang | None) -> None:
        """Keep it."""
        self._found = found

    def said(self) -> tuple[Hang, ...]:
        """Give what this node has found."""
        return (self._found,) if self._found else ()


def together(hangs: Iterable[Hang]) -> Hang | None:
    """Give what several nodes have found as one; None where no rank is left that could hang."""
    stuck = [hang for hang in hangs if hang.ranks]
    if not stuck:
        return None
    ranks = sorted((rank for hang in hangs for rank in hang.ranks), key=lambda rank: rank.rank)
    ended = tuple(sorted(rank for hang in hangs for rank in hang.ended))
    return replace(
        stuck[0],
        quiet_s=min(hang.quiet_s for hang in stuck),
        limit_s=max(hang.limit_s for hang in stuck),
        verdict=verdict(tuple(ranks), ended),
        ranks=tuple(ranks),
        ended=ended,
    )
