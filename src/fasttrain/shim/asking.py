"""What the ranks ask each other about the losses of one backward pass."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from fasttrain.shim.ranks import NUMBERS, Ranks

TIMES = 32  # kept, of the latest


@dataclass(slots=True)
class Told:
    """What the ranks told each other.

    Attributes:
        sums: What each term counts for on all ranks, and the sum of what it is there, so weighted;
            (2, terms).
        means: Ranks that see one mean; None on a GPU, where nothing is foretold.
        foretold: Ranks that have foretold what it counts for.
    """

    sums: Tensor
    means: float | None = None
    foretold: float = 0.0


class Asking:
    """Adds up weights and losses over the ranks.

    Attributes:
        times_s: What it took, in seconds.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.times_s: deque[float] = deque(maxlen=TIMES)
        self._ranks = ranks

    def together(self, both: Tensor, *, one_mean: bool) -> Told:
        """Ask about several terms, and wait.

        Args:
            both: Their weights and amounts; (2, terms).
            one_mean: Whether this rank sees one mean and nothing else.
        """
        begun_s = time.perf_counter()
        if both.device.type == "cpu":
            wait = self._ranks.begin_sum((float(one_mean), 0.0, *both.T.flatten().tolist()))
            means, foretold, *sums = wait()
            told = Told(torch.tensor(sums, dtype=both.dtype).view(-1, 2).T, means, foretold)
        else:
            # Of one size, so that ranks that have more or fewer terms don't wait for ever.
            padded = torch.zeros(2, NUMBERS // 2, dtype=both.dtype, device=both.device)
            padded[:, : both.size(1)] = both
            told = Told(self._ranks.sum(padded)[:, : both.size(1)])
        self.times_s.append(time.perf_counter() - begun_s)
        return told
