"""What the levers of a data-parallel strategy share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from fasttrain.model.levers import Strategy
from fasttrain.shim.data_parallel.random_streams import RandomStreams
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.hooks.dynamo import UserCompile
from fasttrain.shim.hooks.loop import TrainingState
from fasttrain.shim.hooks.roots import RootCalls

# What a snapshot needs from the other levers: the ranks, their random streams, their states.


class Stateful(Protocol):
    """Something whose state affects the numbers of later steps."""

    def state(self) -> dict[str, Any]:
        """Return the state."""

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state."""


class Attributes:
    """Some attributes of one object, as a `Stateful`."""

    def __init__(self, owner: Any, *names: str) -> None:
        self._owner, self._names = owner, names

    def state(self) -> dict[str, Any]:
        """Return the attributes by name."""
        return {name: getattr(self._owner, name) for name in self._names}

    def restore(self, state: dict[str, Any]) -> None:
        """Set the attributes."""
        for name, value in state.items():
            setattr(self._owner, name, value)


@dataclass(slots=True)
class LeverState:
    """The levers' state; filled while they are built.

    Attributes:
        ranks: All ranks; None if the ranks are not one data-parallel run of the shim's.
        streams: The ranks' random streams.
        states: Other states to save, by name.
        replayed: Number of steps that a replay skips; infinite until the replay ends.
        apart: Returns a context in which this rank asks no other one for anything.
    """

    ranks: Ranks | None = None
    streams: RandomStreams | None = None
    states: dict[str, Stateful] = field(default_factory=dict)
    replayed: float = 0.0
    apart: Callable[[], AbstractContextManager[None]] = nullcontext


# What the levers of a data-parallel strategy share.


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """One rank's view of a data-parallel run.

    Attributes:
        strategy: The plan's strategy.
        ranks: This rank among the others.
        roots: Calls of roots.
        streams: Random streams: the shared one and the rank's own.
        training: Knows whether the script trains or evaluates.
        compiled: Knows what the script compiles itself.
    """

    strategy: Strategy
    ranks: Ranks
    roots: RootCalls
    streams: RandomStreams
    training: TrainingState
    compiled: UserCompile
