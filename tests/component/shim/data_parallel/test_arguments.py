"""What a call does to the tensors that it is given, by which it can't be split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttrain.shim.data_parallel.split.trial import Arguments


@pytest.mark.parametrize(
    ("act", "word"),
    [
        (Tensor.sum, ""),
        (lambda x: x.detach().requires_grad_(), ""),
        (Tensor.zero_, "in place"),
        (Tensor.requires_grad_, "gradients"),
    ],
)
def test_what_a_call_does_to_a_tensor_is_noticed(act: Callable[[Tensor], Any], word: str) -> None:
    tensor = torch.ones(3)
    arguments = Arguments([tensor])
    act(tensor)
    change = arguments.change()
    assert (word in change) if word else not change


def test_a_gradient_that_is_kept_is_noticed() -> None:
    hidden = torch.ones(3, requires_grad=True).exp()
    arguments = Arguments([hidden])
    hidden.retain_grad()
    assert "gradients" in arguments.change()


def test_tensors_of_inference_mode_count_nothing() -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
        arguments = Arguments([tensor])
        tensor.zero_()
    assert arguments.change() == ""
