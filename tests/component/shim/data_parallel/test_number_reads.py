"""Which numbers that are read in a call rule out a split of it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import (
    Categorical,
    ContinuousBernoulli,
    Geometric,
    MultivariateNormal,
    Normal,
    OneHotCategorical,
)
from torch.nn import functional

from fasttrain.shim.data_parallel.split import number_reads
from fasttrain.shim.data_parallel.split.neutral import Neutral
from fasttrain.shim.data_parallel.split.number_reads import CLASSES
from fasttrain.shim.data_parallel.split.surroundings import READS

X, Y = torch.linspace(-1, 1, 12).view(4, 3), torch.tensor([0, 2, 1, 2])
MASK = nn.Transformer.generate_square_subsequent_mask(3)
ENCODER = nn.TransformerEncoder(
    nn.TransformerEncoderLayer(3, 1, 4, batch_first=True), 1, enable_nested_tensor=False
)


@pytest.fixture(autouse=True)
def _watched() -> Iterator[None]:
    with ExitStack() as undo:
        number_reads.watch_one_hot(undo)
        yield


def why(act: Callable[[], Any]) -> str:
    """Return why what an act reads rules out a split."""
    with Neutral() as neutral:
        act()
    return neutral.reads


def with_a_default_device() -> Tensor:
    with torch.device("cpu"):
        return functional.one_hot(Y, 3)


def caught() -> Tensor:
    try:
        return functional.one_hot(Y, 2)
    except RuntimeError:
        return functional.one_hot(Y.clamp(max=1), 2)


CHECKED: dict[str, Callable[[], Any]] = {
    "one_hot": lambda: functional.one_hot(Y, 3),
    "one_hot by name": lambda: functional.one_hot(Y, num_classes=3),
    "one_hot of NumPy's": lambda: functional.one_hot(Y, np.int64(3)),
    "one_hot with a default device": with_a_default_device,
    "normal": lambda: Normal(X, X.exp(), validate_args=True).log_prob(X),
    "policy": lambda: Categorical(logits=X, validate_args=True).log_prob(Y),
    "codes": lambda: OneHotCategorical(logits=X, validate_args=True).mode,
    "covariance": lambda: MultivariateNormal(X, torch.eye(3), validate_args=True).log_prob(X),
    "geometric": lambda: Geometric(probs=X.sigmoid(), validate_args=True),
    "continuous": lambda: ContinuousBernoulli(probs=X.sigmoid(), validate_args=True),
    "variance": lambda: functional.gaussian_nll_loss(X, X, X.exp(), reduction="none"),
    "mask": lambda: ENCODER(X.view(4, 1, 3).expand(4, 3, 3), mask=MASK),
}


@pytest.fixture(params=[False, True], ids=["", "in inference mode"])
def _mode(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.inference_mode(mode=request.param):
        yield


@pytest.mark.usefixtures("_mode")
@pytest.mark.parametrize("name", CHECKED)
def test_what_torch_checks_of_each_row_is_no_reason(name: str) -> None:
    assert why(CHECKED[name]) == ""


READ: dict[str, Callable[[], Any]] = {
    "its largest": lambda: functional.one_hot(Y, 3).sum(0).max().item(),
    "its classes": lambda: functional.one_hot(Y, int(Y.max()) + 1),
    "its classes as a tensor": lambda: functional.one_hot(Y, Y.max() + 1),
    "a branch": lambda: X.sum() > 0 or None,
    "a comparison": lambda: torch.equal(X, X.relu()),
    "a close one": lambda: torch.allclose(X, X.relu()),
    "an error of one_hot": caught,
    "beside a distribution": lambda: bool(Normal(X, X.exp()).mean.sum() == 0),
}


@pytest.mark.usefixtures("_mode")
@pytest.mark.parametrize("name", READ)
def test_what_the_script_reads_is_a_reason(name: str) -> None:
    assert why(READ[name]) == READS


@pytest.mark.usefixtures("_mode")
@pytest.mark.parametrize("classes", [{}, {"num_classes": -1}])
def test_classes_that_are_counted_are_a_reason(classes: dict[str, int]) -> None:
    assert why(lambda: functional.one_hot(Y, **classes)) == CLASSES


def test_invalid_arguments_are_a_reason() -> None:
    neutral = Neutral()
    with pytest.raises(ValueError, match="Expected parameter scale"), neutral:
        Normal(torch.zeros(4), -torch.ones(4), validate_args=True)
    assert neutral.reads == READS


class Coded(nn.Module):
    def forward(self, labels: Tensor) -> Tensor:
        return functional.one_hot(labels, 3)


@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")
def test_one_hot_is_what_it_was_to_a_script() -> None:
    expected = torch.eye(3, dtype=torch.int64)[Y]
    assert torch.equal(torch.jit.script(Coded())(Y), expected)
    assert torch.equal(torch.fx.symbolic_trace(Coded())(Y), expected)
    assert torch.equal(torch.compile(Coded(), backend="eager", fullgraph=True)(Y), expected)
    assert pickle.loads(pickle.dumps(functional.one_hot)) is functional.one_hot
    with pytest.raises(RuntimeError, match="smaller than num_classes"):
        functional.one_hot(Y, 2)
