"""What a snapshot has to know of the other levers: the ranks, and what they have learnt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from fasttrain.shim.data_parallel.random_streams import RandomStreams
from fasttrain.shim.data_parallel.ranks import Ranks


class Stateful(Protocol):
    """Something whose state decides on the numbers of the steps to come."""

    def state(self) -> dict[str, Any]:
        """Give it."""

    def restore(self, state: dict[str, Any]) -> None:
        """Put it back."""


class Attributes:
    """Some attributes of one object."""

    def __init__(self, owner: Any, *names: str) -> None:
        self._owner, self._names = owner, names

    def state(self) -> dict[str, Any]:
        """Give them by name."""
        return {name: getattr(self._owner, name) for name in self._names}

    def restore(self, state: dict[str, Any]) -> None:
        """Set them."""
        for name, value in state.items():
            setattr(self._owner, name, value)


@dataclass(slots=True)
class LeverState:
    """Filled while the levers are built.

    Attributes:
        ranks: All ranks, where the shim makes them one run.
        streams: Their random numbers.
        states: What else is to be kept, by name.
        replayed: Steps that the run before has made, and this one doesn't compute; infinite while
            their end has not come.
    """

    ranks: Ranks | None = None
    streams: RandomStreams | None = None
    states: dict[str, Stateful] = field(default_factory=dict)
    replayed: float = 0.0
