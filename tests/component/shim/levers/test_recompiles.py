"""Reasons for compiling again are put into words, as torch has them and as a user reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import utils

from fasttrain.shim.levers.compile.recompiles import in_words


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
        self.scale = 1

    def forward(self, x: Tensor, factor: float = 1.0) -> Any:
        return self.body(x) * self.scale * factor


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def without_gradients(head: Head, call: Any) -> None:
    with torch.no_grad():
        call(torch.ones(3, 4))


def evaluates(head: Head, call: Any) -> None:
    head.eval()
    call(torch.ones(3, 4))


def freezes(head: Head, call: Any) -> None:
    head.body[0].weight.requires_grad_(False)
    call(torch.ones(3, 4))


@pytest.mark.parametrize(
    ("then", "words"),
    [
        (without_gradients, "gradients were switched on or off"),
        (lambda _, call: call(torch.ones(5, 4)), "x has size 5 in dimension 0, not 3"),
        (lambda _, call: call(torch.ones(2, 3, 4)), "x has 3 dimensions, not 2"),
        (
            lambda _, call: call(torch.ones(3, 4, requires_grad=True)),
            "x needs gradients now, and didn't before",
        ),
        (
            lambda _, call: call(torch.ones(4, 3).t()),
            "x lies in memory in another way: its stride in dimension 0 is 1, not 4",
        ),
        (
            lambda _, call: call(nn.Parameter(torch.ones(3, 4))),
            "x is a Parameter now, and was of another class",
        ),
        (freezes, "self.body[0].weight needed gradients before, and doesn't now"),
        (evaluates, "self.body[1].training == True is no longer true, at nn/modules/dropout.py:"),
        (lambda _, call: call(torch.ones(3, 4), 2.5), "factor == 1.0 is no longer true, at "),
    ],
)
def test_reasons_are_in_words(then: Callable[[Head, Any], None], words: str) -> None:
    utils.clear_compilation_metrics()  # dynamo keeps the last ones alone
    head = Head()
    call = torch.compile(head, backend="eager")
    call(torch.ones(3, 4))
    then(head, call)
    reasons = [m.recompile_reason for m in utils.get_compilation_metrics()]
    assert in_words(next(filter(None, reasons))).startswith(words)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("0/0: tensor 'x' dtype mismatch. expected Float, actual Double", "x is Double, not Float"),
        (
            "1/0: GLOBAL_STATE changed: num_threads ",
            "a setting of torch changed: num_threads",
        ),
        ("0/0: something else\nUser stack trace:\n  File", "something else"),
    ],
)
def test_other_reasons(reason: str, words: str) -> None:
    assert in_words(reason) == words
