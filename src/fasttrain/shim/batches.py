"""What the batch that the script works on is to the ranks: shared by the levers of a strategy."""

from __future__ import annotations

from typing import Literal

from fasttrain.shim.shares import Share

Feeding = Literal["nothing", "cut", "whole"]


class Batches:
    """Follows what DataLoaders hand out for training.

    Attributes:
        fed: Where the training batches come from: from loaders that are cut, from loaders whose
            batches all ranks have whole, or from no loader so far.
        share: The rank's part of the last batch that was cut; None without one.
    """

    def __init__(self) -> None:
        self.fed: Feeding = "nothing"
        self.share: Share | None = None

    def cut(self, share: Share) -> None:
        """Note a batch that was cut."""
        self.fed, self.share = "cut", share

    def whole(self) -> None:
        """Note a training batch that every rank has whole."""
        self.share = None
        if self.fed == "nothing":
            self.fed = "whole"
