"""Parameters that an optimizer trains and no root has, such as a bare temperature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from fasttrain.shim.data_parallel.averaging import average_gradients
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.hooks.training_mode import TrainingState


class HasParameters(Protocol):
    """A root's side of the averaging."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """Its parameters."""


class StrayParameters:
    """Averages their gradients by hand.

    Attributes:
        parameters: Those that were found behind the last pass.
    """

    def __init__(self, ranks: Ranks, training: TrainingState) -> None:
        self._ranks = ranks
        self._training = training
        self.parameters: list[Tensor] = []
        self._known = (-1, -1)

    def after_backward(self, roots: Sequence[HasParameters]) -> None:
        """Average what a pass has left."""
        self._look(roots)
        if self.parameters:
            average_gradients(self.parameters, self._ranks)

    def _look(self, roots: Sequence[HasParameters]) -> None:
        """Look for them again where an optimizer or a root has come or gone."""
        groups = self._training.groups()
        known = (sum([len(group["params"]) for group in groups]), len(roots))
        if self._known == known:
            return
        self._known = known
        of_roots = {id(p) for root in roots for p in root.parameters}
        before = {id(p) for p in self.parameters}
        found = {id(p): p for g in groups for p in g["params"] if id(p) not in of_roots}
        self.parameters = list(found.values())
        self._ranks.broadcast([p for p in self.parameters if id(p) not in before])
