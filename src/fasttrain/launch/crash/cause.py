"""One row of the table of causes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from fasttrain.launch.crash.cause_facts import Facts
from fasttrain.launch.crash.evidence import Case


class Heals(StrEnum):
    """Whether another attempt can end better; the value is the reason."""

    NEVER = "another attempt would meet the same"
    # Most mistakes in a program show before it has trained at all.
    TRAINED = "it failed after it had trained, and goes on from its last checkpoint"
    ONCE = "it may not happen again"
    ALWAYS = "it came from outside of the script"


@dataclass(frozen=True, slots=True)
class Cause:
    """One row.

    Attributes:
        slug: Stable name.
        heals: Whether another attempt can end better.
        rule: Gives the facts that `why` and `fix` are filled with, or None where it doesn't fit.
        why: The cause in words.
        fix: What to type or change next; empty where there is nothing to suggest.
        of_a_peer: Whether it is what a rank says that lost, or waited for, another one.
    """

    slug: str
    heals: Heals
    rule: Callable[[Case], Facts | None]
    why: str
    fix: str
    of_a_peer: bool = False
