"""What a process under `--compile auto` asks of the other ranks, and a process without any."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

FIRST_LOOKS = 10  # steps between two looks, until the time of a step is known
T = TypeVar("T")
Steps = Generator[int, None, T]  # resumed after as many steps as it yields
What = Literal["watched", "switched", "pairs", "kept", "dropped", "eager"]


@dataclass(frozen=True, slots=True)
class Ready:
    """What a rank would compile.

    Attributes:
        calls: Each model, where it is called, and the form of its calls.
        why_not: Why it can compile nothing; empty if it can.
    """

    calls: tuple[str, ...]
    why_not: str


class Peers(Protocol):
    """The other ranks.

    Attributes:
        several: Whether there are any.
    """

    several: bool

    def object(self, why: str) -> bool:
        """Have all ranks run eagerly soon; return False if this one is to do so at once."""

    def end(self, what: What, reason: str) -> None:
        """Announce an end for which this rank doesn't wait, unless one is announced already."""


class Others(Peers, Protocol):
    """The other ranks, as the rank sees them that decides.

    Attributes:
        every: Steps between two looks for what they say.
        pairs_at_once: Pairs of blocks that are timed before the next decision.
    """

    every: int
    pairs_at_once: int

    def agree(self, own: Ready) -> Steps[str]:
        """Return why not all ranks can compile the same; empty if they can."""

    def pace(self, step_s: float) -> None:
        """Set how often the others look, from the next notice on, by the time of a step."""

    def meet(
        self,
        what: What,
        reason: str = "",
        *,
        roots: Sequence[int] = (),
        sides: Sequence[bool] = (),
        each: int = 0,
    ) -> Steps[None]:
        """Announce a change to all ranks, and go on when it takes effect."""

    def objection(self) -> str:
        """Return why a rank wants all to run eagerly; empty if none does."""

    def in_copy(self) -> AbstractContextManager[None]:
        """Return the context in which a forked copy of this process makes a call."""

    def on_fork(self) -> None:
        """Do what is due after a fork, also one that has failed."""


class NoOthers:
    """One process."""

    several = False
    every = FIRST_LOOKS
    pairs_at_once = 1

    def agree(self, own: Ready) -> Steps[str]:
        """Return why it can't compile."""
        yield from ()
        return own.why_not

    def pace(self, step_s: float) -> None:
        """Do nothing."""

    def meet(self, what: What, reason: str = "", **_: Any) -> Steps[None]:  # noqa: ARG002
        """Go on at once."""
        yield from ()

    def objection(self) -> str:
        """Return nothing."""
        return ""

    def in_copy(self) -> AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return nullcontext()

    def on_fork(self) -> None:
        """Do nothing."""

    def object(self, why: str) -> bool:  # noqa: ARG002
        """Return that this process does what it wants."""
        return False

    def end(self, what: What, reason: str) -> None:
        """Do nothing."""
