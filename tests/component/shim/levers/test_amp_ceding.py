"""A script that manages precision itself is left to it, and the receipt says where."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain.model.outcome import State
from support.rig import Probe

X = torch.ones(4, 2)


def here(line_with: str) -> str:
    """Return ``file:line`` of the line of this file that holds a text, as the receipt tells it."""
    lines = Path(__file__).read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line_with in line and "here(" not in line)
    return f"test_amp_ceding.py:{number}"


def use_with(model: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):  # own: with
        return model(X)


@torch.autocast("cpu", dtype=torch.bfloat16)
def use_decorator(model: Any) -> Any:
    return model(X)


def use_alias(model: Any) -> Any:
    with torch.cpu.amp.autocast():  # own: alias
        return model(X)


@pytest.mark.filterwarnings("ignore:.*autocast:FutureWarning")
@pytest.mark.parametrize(
    ("use", "line"),
    [(use_with, "# own: with"), (use_decorator, None), (use_alias, "# own: alias")],
)
def test_the_scripts_own_autocast(amp: Any, use: Any, line: str | None) -> None:
    model = Probe()
    assert use(model).dtype is torch.bfloat16
    assert model(X).dtype is torch.float32
    assert model.seen == [torch.bfloat16, torch.float32]
    outcome = amp()
    assert outcome.state is State.CEDED
    assert re.search(r"test_amp_ceding\.py:\d+", outcome.reason)
    if line:
        assert here(line) in outcome.reason


def test_the_scripts_own_autocast_inside_the_model(amp: Any) -> None:
    class Own(Probe):
        def forward(self, x: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    model = Own()
    # The call that shows it had begun in bf16: what follows the script's own autocast in it, and
    # is fp32 in the script alone, has to come out so.
    assert [model(X).dtype for _ in range(2)] == [torch.float32, torch.bfloat16]
    assert amp().state is State.CEDED
    assert any(re.search(r"\bOwn\b.*\bbfloat16\b", note) for note in amp().notes)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_the_scripts_own_autocast_inside_of_what_it_compiles(amp: Any) -> None:
    """Dynamo enters autocast while it traces, and never when the graph runs."""

    @torch.compile(backend="eager")
    def forward(x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x.T

    model = nn.Linear(2, 2)
    model(X)
    forward(X)
    lines = Path(__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if "return x @ x.T" in text) - 1
    assert amp().state is State.CEDED
    assert f"test_amp_ceding.py:{line})" in amp().reason


def test_an_autocast_that_is_switched_off_is_not_the_scripts_own(amp: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        assert Probe()(X).dtype is torch.float32
    assert amp().counts == {"forwards": 1}


@pytest.mark.parametrize(("enabled", "state"), [(True, State.CEDED), (False, State.APPLIED)])
def test_the_scripts_own_scaler(amp: Any, enabled: bool, state: State) -> None:
    torch.amp.GradScaler("cpu", enabled=enabled)
    Probe()(X)
    assert amp().state is state


def test_a_scaler_that_finds_no_gpu_is_not_enabled(amp: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        torch.amp.GradScaler("cuda")
    Probe()(X)
    assert amp().state is State.APPLIED


def test_autocast_that_is_on_already_is_left_alone(amp: Any) -> None:
    torch.set_autocast_enabled("cpu", True)  # past the class, as some frameworks do
    try:
        assert Probe()(X).dtype is torch.bfloat16
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()
    assert amp().state is State.ARMED
