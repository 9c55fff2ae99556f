"""Which numbers that are read in a call rule out a split of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import (
    Categorical,
    ContinuousBernoulli,
    Geometric,
    MultivariateNormal,
    Normal,
)
from torch.nn import functional

from fasttrain.shim.data_parallel.split.neutral import Neutral
from fasttrain.shim.data_parallel.split.surroundings import READS

X, Y = torch.linspace(-1, 1, 12).view(4, 3), torch.tensor([0, 2, 1, 2])
MASK = nn.Transformer.generate_square_subsequent_mask(3)
ENCODER = nn.TransformerEncoder(
    nn.TransformerEncoderLayer(3, 1, 4, batch_first=True), 1, enable_nested_tensor=False
)


def why(act: Callable[[], Any]) -> str:
    """Return why what an act reads rules out a split."""
    with Neutral() as neutral:
        act()
    return neutral.reads


def with_a_default_device() -> Normal:
    with torch.device("cpu"):
        return Normal(X, X.exp(), validate_args=True)


CHECKED: dict[str, Callable[[], Any]] = {
    "with a default device": with_a_default_device,
    "normal": lambda: Normal(X, X.exp(), validate_args=True).log_prob(X),
    "policy": lambda: Categorical(logits=X, validate_args=True).log_prob(Y),
    "covariance": lambda: MultivariateNormal(X, torch.eye(3), validate_args=True).log_prob(X),
    "geometric": lambda: Geometric(probs=X.sigmoid(), validate_args=True),
    "continuous": lambda: ContinuousBernoulli(probs=X.sigmoid(), validate_args=True),
    "variance": lambda: functional.gaussian_nll_loss(X, X, X.exp(), reduction="none"),
    "mask": lambda: ENCODER(X.view(4, 1, 3).expand(4, 3, 3), mask=MASK),
}


@pytest.mark.parametrize("name", CHECKED)
def test_what_torch_checks_of_each_row_is_no_reason(name: str) -> None:
    assert why(CHECKED[name]) == ""


READ: dict[str, Callable[[], Any]] = {
    "its largest": lambda: X.max().item(),
    "a branch": lambda: X.sum() > 0 or None,
    "beside a distribution": lambda: bool(Normal(X, X.exp()).mean.sum() == 0),
}


@pytest.mark.parametrize("name", READ)
def test_what_the_script_reads_is_a_reason(name: str) -> None:
    assert why(READ[name]) == READS


def test_invalid_arguments_are_a_reason() -> None:
    neutral = Neutral()
    with pytest.raises(ValueError, match="Expected parameter scale"), neutral:
        Normal(torch.zeros(4), -torch.ones(4), validate_args=True)
    assert neutral.reads == READS
