"""One row of the table of causes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fasttrain.launch.case import Case
from fasttrain.launch.cause_rules import Facts


@dataclass(frozen=True, slots=True)
class Cause:
    """One row.

    Attributes:
        slug: Stable name.
        rule: Gives the facts that `why` and `fix` are filled with, or None where it doesn't fit.
        why: The cause in words.
        fix: What to type or change next; empty where there is nothing to suggest.
        of_a_peer: Whether it is what a rank says that lost, or waited for, another one.
    """

    slug: str
    rule: Callable[[Case], Facts | None]
    why: str
    fix: str
    of_a_peer: bool = False
