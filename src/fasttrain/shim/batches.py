"""What the batch that the script works on is to the ranks: shared by the levers of a strategy."""

from __future__ import annotations

from typing import Literal

from fasttrain.shim.shares import Share

Feeding = Literal["nothing", "cut", "whole"]


class Batches:
    """Follows what DataLoaders hand out.

    Attributes:
        fed: Where training batches come from: from loaders that are cut, from loaders whose
            batches all ranks have whole, or from no loader so far.
        current: The same of the last batch that was handed out, for whatever purpose.
        share: The rank's part of it; None unless it was cut.
        trained: Whether a model was trained since that batch was handed out.
    """

    def __init__(self) -> None:
        self.fed: Feeding = "nothing"
        self.current: Feeding = "nothing"
        self.share: Share | None = None
        self.trained = False

    def cut(self, share: Share) -> None:
        """Note a batch for training that was cut."""
        self.fed = self.current = "cut"
        self.share, self.trained = share, False

    def whole(self, *, training: bool) -> None:
        """Note a batch that every rank has whole."""
        self.current, self.share, self.trained = "whole", None, False
        if training and self.fed == "nothing":
            self.fed = "whole"
