"""Probabilities that low precision rounds to 0 or 1 don't stop binary_cross_entropy."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from support.rig import rig

LOGITS = torch.tensor([[-200.0], [-8.0], [0.5], [8.0], [12.0]])


class Answers(nn.Module):
    """Returns its inputs as probabilities, by whatever way a script takes."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.scale.weight)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.scale(x))


WAYS = {
    "module": nn.Sigmoid(),
    "function": lambda x: torch.sigmoid(x),  # looked up when called, as in a script
    "method": lambda x: x.sigmoid(),
    "view": lambda x: torch.sigmoid(x).view(-1, 1).squeeze(1).unsqueeze(1),
    "gates before": lambda x: torch.sigmoid(x + 0 * torch.sigmoid(x)),
}


@pytest.fixture(params=["bfloat16", "float16"])
def amp(request: pytest.FixtureRequest) -> Iterator[Any]:
    with rig(amp=request.param):
        yield getattr(torch, request.param)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("view", [lambda p: p, lambda p: p.squeeze(), lambda p: p.view(5, 1, 1)])
def test_a_wrong_answer_has_a_finite_logarithm(amp: Any, way: str, view: Any) -> None:
    model = Answers(WAYS[way])
    probabilities = view(model(LOGITS))
    losses = F.binary_cross_entropy(
        probabilities, torch.zeros_like(probabilities), reduction="none"
    ).flatten()
    assert losses[3].item() == pytest.approx(8.0, rel=0.05)
    assert losses[4].item() == pytest.approx(12.0, rel=0.05)
    if amp is torch.float16:
        return  # a gradient of 1 overflows at the first loss scale
    losses[4].backward()
    assert model.scale.weight.grad is not None
    assert model.scale.weight.grad.item() == pytest.approx(12.0, rel=0.05)


def test_a_right_answer_is_rounded_as_by_hand(amp: torch.dtype) -> None:
    rounded = LOGITS.to(amp).sigmoid().float()
    target = (LOGITS > 0).float()
    expected = F.binary_cross_entropy(rounded, target, reduction="none")
    assert expected[4].item() == 0.0
    probabilities = Answers(torch.sigmoid)(LOGITS)
    assert torch.equal(probabilities, rounded)
    assert torch.equal(F.binary_cross_entropy(probabilities, target, reduction="none"), expected)


def test_a_loss_inside_of_the_model(amp: Any) -> None:
    def loss(x: Tensor) -> Tensor:
        return F.binary_cross_entropy(x.sigmoid(), torch.zeros_like(x).float(), reduction="none")

    assert Answers(loss)(LOGITS)[4].item() == pytest.approx(12.0, rel=0.05)


def test_other_probabilities_are_what_they_are(amp: Any) -> None:
    model = Answers(torch.sigmoid)
    certain = model(LOGITS).detach().clone()
    assert F.binary_cross_entropy(certain[4], torch.zeros(1)).item() == 100.0
    half = model(LOGITS)[4:]  # not all of its elements: left as it is
    assert F.binary_cross_entropy(half, torch.zeros(1, 1)).item() == 100.0


def test_an_activation_pickles_as_torchs_own() -> None:
    with rig(amp="bfloat16"):
        pickled = pickle.dumps(torch.sigmoid)
    assert pickle.loads(pickled) is torch.sigmoid
    assert b"fasttrain" not in pickled


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_still_knows_sigmoid(amp: Any) -> None:
    assert torch.jit.script(nn.Sigmoid())(torch.zeros(1)).item() == 0.5


def test_torch_is_as_before_afterwards() -> None:
    function, method = torch.sigmoid, torch.Tensor.sigmoid
    with rig(amp="bfloat16"):
        assert torch.sigmoid is not function
    assert torch.sigmoid is function
    assert torch.Tensor.sigmoid is method
    assert "sigmoid" not in vars(torch.Tensor)
