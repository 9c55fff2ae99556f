"""Why a call isn't split, by what its whole call has done."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain.shim.data_parallel.split.trial import RefusalError, SplitTrial

SEEN = torch.zeros(1)


class Rank:
    def gather(self, text: str) -> list[str]:
        return [text, text]


class Masked(nn.Linear):
    """Keeps some of its weights at zero, as autoregressive convolutions do."""

    def forward(self, x: Any) -> Any:
        self.weight.data *= torch.ones(2, 2).tril()
        return super().forward(x)


class Shifted(nn.Linear):
    """Sets its bias by the first batch, as an activation norm does."""

    def forward(self, x: Any) -> Any:
        self.bias.data.copy_(x.mean(0))
        return super().forward(x)


class Counting(nn.Linear):
    def forward(self, x: Any) -> Any:
        SEEN.add_(1)
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Masked, "its parameters"), (Shifted, "its parameters"), (Counting, "outside its modules")],
)
def test_what_a_call_changes_is_named(kind: type[nn.Linear], why: str) -> None:
    torch.manual_seed(0)
    module, x = kind(2, 2), torch.rand(4, 2)
    trial = SplitTrial(module, Rank(), nullcontext)  # type: ignore[arg-type]
    trial.make_whole_call((x,), {})
    with pytest.raises(RefusalError, match=why):
        trial.find((x,), {}, [x], None, gradients=False)
