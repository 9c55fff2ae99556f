"""Parameters that an optimizer trains and no root has, such as a bare temperature."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fasttrain.shim.averaging import average_gradients
from fasttrain.shim.ranks import Ranks
from fasttrain.shim.training_state import TrainingState


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
        self._pending = False

    def after_backward(self, rooted: Sequence[Sequence[Tensor]], *, average: bool) -> None:
        """Average what a pass has left, or remember that it is left to a later pass.

        Args:
            rooted: Parameters of each root.
            average: Whether it is the last pass before a step.
        """
        strays = self._current(rooted)
        self._pending = bool(strays)
        if average:
            self.flush()

    def flush(self) -> None:
        """Average what was left."""
        if self._pending:
            self._pending = False
            average_gradients(self.parameters, self._ranks)

    def _current(self, rooted: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        trained = 0
        for optimizer in self._training.optimizers:
            for group in optimizer.param_groups:
                trained += len(group["params"])
        if self._known != (trained, len(rooted)):
            self._known = (trained, len(rooted))
            groups = [g for o in self._training.optimizers for g in o.param_groups]
            of_roots = {id(p) for parameters in rooted for p in parameters}
            before = {id(p) for p in self.parameters}
            found = {id(p): p for g in groups for p in g["params"] if id(p) not in of_roots}
            self.parameters = list(found.values())
            self._ranks.broadcast([p for p in self.parameters if id(p) not in before])
        return self.parameters
