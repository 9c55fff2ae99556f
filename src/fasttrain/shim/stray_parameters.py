"""Parameters that an optimizer trains and no root has, such as a bare temperature."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from fasttrain.shim.averaging import average_gradients
from fasttrain.shim.ranks import Ranks
from fasttrain.shim.training_state import TrainingState


class StrayParameters:
    """Averages their gradients by hand."""

    def __init__(self, ranks: Ranks, training: TrainingState) -> None:
        self._ranks = ranks
        self._training = training
        self._parameters: list[Tensor] = []
        self._known = (-1, -1)
        self._pending = False

    def after_backward(self, rooted: Iterable[Sequence[Tensor]], *, average: bool) -> None:
        """Average what a pass has left, or remember that it is left to a later pass.

        Args:
            rooted: Parameters of each root.
            average: Whether it is the last pass before a step.
        """
        strays = self._current(list(rooted))
        self._pending = bool(strays)
        if average:
            self.flush()

    def flush(self) -> None:
        """Average what was left."""
        if self._pending:
            self._pending = False
            average_gradients(self._parameters, self._ranks)

    def _current(self, rooted: list[Sequence[Tensor]]) -> list[Tensor]:
        groups = [g for o in self._training.optimizers for g in o.param_groups]
        known = (sum(len(g["params"]) for g in groups), len(rooted))
        if known != self._known:
            self._known = known
            of_roots = {id(p) for parameters in rooted for p in parameters}
            before = {id(p) for p in self._parameters}
            found = {id(p): p for g in groups for p in g["params"] if id(p) not in of_roots}
            self._parameters = list(found.values())
            self._ranks.broadcast([p for p in self._parameters if id(p) not in before])
        return self._parameters
