"""The precision of matrix products is set once; the script's own later choice wins."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fasttrain.model.outcome import State
from fasttrain.shim.levers.amp.rules import Rules

# What torch starts with; reading it is not left to torch, which mixes two generations of names.
BEFORE = torch.get_float32_matmul_precision()


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision(BEFORE)
    if hasattr(torch.backends, "fp32_precision"):
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.mark.parametrize("choice", ["high", "medium"])
def test_it_is_set_and_put_back(rig: Any, choice: str) -> None:
    with rig(matmul=choice) as runtime:
        assert torch.get_float32_matmul_precision() == choice
        assert runtime.outcomes()["matmul"].state is State.APPLIED
    assert torch.get_float32_matmul_precision() == BEFORE


def test_keep_changes_nothing(rig: Any, machine: Any) -> None:
    with rig(machine, matmul="keep") as runtime:
        assert torch.get_float32_matmul_precision() == BEFORE
        assert runtime.outcomes()["matmul"].state is State.SKIPPED


@pytest.mark.parametrize("choice", ["high", "keep"])
def test_the_scripts_own_choice_by_function(rig: Any, choice: str) -> None:
    with rig(matmul=choice) as runtime:
        torch.set_float32_matmul_precision("medium")
        outcome = runtime.outcomes()["matmul"]
        assert torch.get_float32_matmul_precision() == "medium"
    assert outcome.state is State.CEDED
    assert re.search(r"test_matmul_lever\.py:\d+", outcome.reason)


def test_the_scripts_own_choice_by_attribute(rig: Any) -> None:
    with rig(matmul="high") as runtime:
        torch.backends.cuda.matmul.allow_tf32 = False
        assert torch.get_float32_matmul_precision() == "highest"
        assert runtime.outcomes()["matmul"].state is State.CEDED


@pytest.mark.parametrize("choice", ["high", "keep"])
def test_the_scripts_own_choice_for_all_backends(rig: Any, choice: str) -> None:
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("needs torch 2.9, with torch.backends.fp32_precision")
    with rig(matmul=choice) as runtime:
        torch.backends.fp32_precision = "ieee"
        found = torch.backends.cuda.matmul.fp32_precision
        torch.backends.fp32_precision = "none"
        assert found == "ieee"  # and not what fasttrain had set for cuda alone
        assert runtime.outcomes()["matmul"].state is State.CEDED


def test_every_part_is_put_back(rig: Any) -> None:
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("needs torch 2.9, with torch.backends.fp32_precision")
    torch.backends.cuda.matmul.fp32_precision = "none"
    with rig(matmul="high"):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == "none"


def test_it_follows_amp_where_the_machine_decided(rig: Any, machine: Any) -> None:
    with rig(machine, matmul="high", amp="bfloat16") as runtime:
        assert torch.get_float32_matmul_precision() == BEFORE
        model = torch.nn.Linear(256, 256).requires_grad_(False)
        other = torch.nn.Linear(4, 4)
        assert runtime.outcomes()["matmul"].state is State.SKIPPED
        model(torch.ones(64, 256))  # which is judged
        assert torch.get_float32_matmul_precision() == BEFORE
        model(torch.ones(64, 256))
        assert torch.get_float32_matmul_precision() == "high"
        assert runtime.outcomes()["matmul"].state is State.APPLIED
        optimizer = torch.optim.SGD(other.parameters())
        other(torch.ones(2, 4)).sum().backward()
        optimizer.step()  # after which the rules leave it
        assert torch.get_float32_matmul_precision() == "high"  # for the other one
        with torch.autocast("cpu", dtype=torch.bfloat16):  # the script's own
            assert torch.get_float32_matmul_precision() == BEFORE
        assert runtime.outcomes()["matmul"].state is State.SKIPPED


class Failing(torch.nn.Linear):
    """Fails in bf16 where it is broken."""

    def __init__(self, *, broken: bool, see: Any = lambda _: None) -> None:
        super().__init__(4, 4)
        self.broken, self.see = broken, see

    def forward(self, x: Any) -> Any:
        self.see(torch.get_float32_matmul_precision())
        y = super().forward(x)
        return torch.zeros(2, 4).index_add_(0, torch.arange(2), y) if self.broken else y


@pytest.fixture
def lowered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no rule keep a model from low precision."""
    monkeypatch.setattr(Rules, "count", lambda *given: ("", given[-1]))


def test_it_is_set_before_the_first_call_in_low_precision(
    rig: Any, machine: Any, lowered_at_once: None
) -> None:
    """What is compiled in that call would else be compiled for both precisions."""
    with rig(machine, matmul="high", amp="bfloat16"):
        seen: list[str] = []
        for broken in (True, False):
            Failing(broken=broken, see=seen.append)(torch.ones(2, 4))
        assert seen == ["high", BEFORE, "high"]


def test_it_is_taken_back_when_amp_has_left_every_model(
    rig: Any, machine: Any, lowered_at_once: None
) -> None:
    with rig(machine, matmul="high", amp="bfloat16") as runtime:
        model = Failing(broken=False)
        model(torch.ones(2, 4))
        assert torch.get_float32_matmul_precision() == "high"
        model.broken = True
        model(torch.ones(2, 4))
        assert torch.get_float32_matmul_precision() == BEFORE
        assert runtime.outcomes()["matmul"].state is State.SKIPPED
