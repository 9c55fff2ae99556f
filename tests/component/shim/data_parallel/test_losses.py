"""Losses in a split call: the mean of the whole batch, whatever torch divides it by."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fasttrain.shim.data_parallel.split import whole_batch

CHANCE = torch.Generator().manual_seed(0)
ROWS, CLASSES = 7, 5
VALUES = {
    "input": torch.rand(ROWS, CLASSES, generator=CHANCE),
    "target": torch.rand(ROWS, CLASSES, generator=CHANCE),
}
WEIGHT = {"weight": torch.rand(ROWS, CLASSES, generator=CHANCE)}
PADDED = {"weight": torch.tensor([1.0, 0, 0, 1, 0, 0, 0]).view(-1, 1).expand(ROWS, CLASSES)}
SCORES, LABELS = torch.randn(ROWS, CLASSES, generator=CHANCE), torch.tensor([1, 4, 1, 0, 2, 2, 1])
LABELLED = {"input": SCORES, "target": LABELS}
ELEMENTWISE = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "smooth_l1_loss",
)
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, VALUES) for name in ELEMENTWISE),
    *((name, VALUES | weight) for name in ("l1_loss", "mse_loss", "huber_loss", ELEMENTWISE[0])
      for weight in (WEIGHT, PADDED, {"weight": PADDED["weight"] > 0})),
    ("mse_loss", VALUES | {"weight": torch.zeros(ROWS, CLASSES)}),
    ("mse_loss", VALUES | WEIGHT | {"reduction": "sum"}),
    (ELEMENTWISE[1], VALUES | {"pos_weight": torch.rand(CLASSES, generator=CHANCE)}),
    ("kl_div", VALUES | {"reduction": "batchmean"}),
    *((name, LABELLED | how) for name in ("cross_entropy", "nll_loss")
      for weight in ({}, {"weight": torch.rand(CLASSES, generator=CHANCE)})
      for how in (weight, weight | {"ignore_index": 1},
                  weight | {"target": LABELS.to(torch.uint8)},
                  weight | {"target": torch.full((ROWS,), -100)})),
    ("cross_entropy", LABELLED | {"label_smoothing": 0.3, "ignore_index": 1,
                                  "weight": torch.rand(CLASSES, generator=CHANCE)}),
    ("cross_entropy", {"input": SCORES, "target": VALUES["target"].softmax(1),
                       "weight": torch.rand(CLASSES, generator=CHANCE), "label_smoothing": 0.2}),
]  # fmt: skip


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The summands of ranks that compute one after the other."""
    summands: list[Tensor] = []

    def total(part: Tensor, *, of_loss: bool) -> Tensor:
        assert of_loss
        summands.append(part)
        return torch.stack(summands).sum(0)

    monkeypatch.setattr(whole_batch, "total", total)
    with ExitStack() as undo:
        active: Any = SimpleNamespace(active=True)
        whole_batch.install_losses(active, undo)
        yield summands


@pytest.mark.filterwarnings("ignore:reduction:UserWarning")  # of kl_div's mean
@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize(("name", "given"), CASES)
def test_a_loss_is_that_of_the_whole_batch(
    name: str, given: dict[str, Any], by_name: bool, parts: Any
) -> None:
    whole = getattr(functional, name).__wrapped__(**given)
    for rows in (slice(0, 3), slice(3, ROWS)):
        own = {key: value[rows] if isinstance(value, Tensor) and len(value) == ROWS else value
               for key, value in given.items()}  # fmt: skip
        named = {} if by_name else {"input": own.pop("input"), "target": own.pop("target")}
        split = getattr(functional, name)(*named.values(), **own)
    assert len(parts) == 2
    torch.testing.assert_close(split, whole, equal_nan=True)


class _Scripted(torch.nn.Module):
    def forward(self, predicted: Tensor, wanted: Tensor) -> Tensor:
        return functional.mse_loss(predicted, wanted) + functional.l1_loss(predicted, wanted)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("parts")
def test_a_model_with_a_loss_can_be_compiled_by_torchscript() -> None:
    scripted: Any = torch.jit.script(_Scripted())
    assert float(scripted(torch.tensor([1.0, 3.0]), torch.zeros(2))) == 7.0
