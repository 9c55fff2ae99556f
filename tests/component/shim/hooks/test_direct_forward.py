"""Models that are trained by ``model.forward(x)``, which passes by ``Module.__call__``."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn


class Scored(nn.Module):
    """Has arithmetic of its own between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(4, 4), nn.Parameter(torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) @ self.weight.t()

    def training_loss(self, x: Tensor) -> Tensor:
        return self.forward(x).sum()


def line_of_the_loss() -> int:
    lines, first = inspect.getsourcelines(Scored.training_loss)
    return first + len(lines) - 1


def test_what_ran_in_fp32_is_told_beside_the_layers(amp: Any) -> None:
    model = Scored()
    model.training_loss(torch.ones(3, 4))
    outcome = amp()
    assert [site.what for site in outcome.sites] == ["Linear"]
    (missed,) = outcome.missed
    assert missed.startswith("Scored (")
    assert f"test_direct_forward.py:{line_of_the_loss()}): " in missed
    assert "forward()" in missed


def test_a_model_that_is_called_is_not(amp: Any) -> None:
    Scored()(torch.ones(3, 4))
    assert (amp().missed, amp().notes) == ((), ())


def test_parts_that_a_method_calls_are_not(amp: Any) -> None:
    class Parts(Scored):
        def encode(self, x: Tensor) -> Tensor:
            return self.first(x)

    Parts().encode(torch.ones(3, 4))
    assert (amp().missed, amp().notes) == ((), ())


def test_compile_tells_it_too(rig: Any, backend: Any) -> None:
    with backend("eager"), rig(compile="default") as runtime:
        Scored().training_loss(torch.ones(3, 4))
        outcome = runtime.outcomes()["compile"]
    assert outcome.counts["targets"] == 1
    assert [note.split(" (")[0] for note in outcome.notes if "forward()" in note] == ["Scored"]
