"""What the levers of a data-parallel strategy share."""

from __future__ import annotations

from dataclasses import dataclass

from fasttrain.model.levers import Strategy
from fasttrain.shim.data_parallel.random_streams import RandomStreams
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.hooks.training_mode import TrainingState
from fasttrain.shim.hooks.user_compile import OwnCompile


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
    compiled: OwnCompile
