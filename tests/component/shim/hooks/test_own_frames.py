"""Stacks and tracebacks that are printed while the script runs hold none of the shim's frames."""

from __future__ import annotations

import io
import logging
import traceback
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

X = torch.ones(4, 2)
SHIM = "fasttrain/shim"


class Teller(nn.Module):
    """Keeps the stacks of its calls, as Python's functions give them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.told: list[str] = []
        self.innermost = ""

    def forward(self, x: Tensor, *, fails: bool = False) -> Tensor:
        self.told.append("".join(traceback.format_stack()))
        walked = traceback.StackSummary.extract(traceback.walk_stack(None))
        self.innermost = walked[0].name
        if fails:
            raise ValueError("from the model")
        return self.linear(x)


def test_stacks_inside_of_a_model(rig: Any) -> None:
    with rig(amp="bfloat16"):
        model = Teller()
        model(X)
        try:
            model(X, fails=True)
        except ValueError:
            model.told.append(traceback.format_exc())
    assert len(model.told) == 3
    for told in model.told:
        assert SHIM not in told
        assert told.count("in test_stacks_inside_of_a_model") == 1
    assert "in forward" in model.told[2]


def test_a_stack_is_walked_from_its_caller_on(rig: Any) -> None:
    with rig(amp="bfloat16"):
        model = Teller()
        model(X)
    plain = Teller()
    plain(X)
    assert model.innermost == plain.innermost


def test_stack_of_a_log_line(rig: Any) -> None:
    out = io.StringIO()
    logger = logging.Logger("of a script")
    logger.addHandler(logging.StreamHandler(out))
    with rig(amp="bfloat16"):
        model = nn.Sequential(nn.Linear(2, 2))
        model[0].register_forward_hook(lambda *_: logger.warning("here", stack_info=True))
        model(X)
    assert "in test_stack_of_a_log_line" in out.getvalue()
    assert SHIM not in out.getvalue()


class Failing(nn.Module):
    """Its derivative is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * torch.inf).sub(torch.inf).sqrt()


def test_the_forward_call_that_anomaly_detection_names(rig: Any) -> None:
    with warnings.catch_warnings(record=True) as told, rig(amp="bfloat16"):
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="nan"):
            Failing()(X).sum().backward()
    stacks = [str(one.message) for one in told if "forward call" in str(one.message)]
    assert len(stacks) == 1
    assert "in test_the_forward_call" in stacks[0]
    assert SHIM not in stacks[0]
