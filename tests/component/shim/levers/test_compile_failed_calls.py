"""A call that fails in a compiled graph is made again as the script has it."""

from __future__ import annotations

import random
import runpy
import signal
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasttrain.model.outcome import State
from fasttrain.shim.levers.compile.slots import FAILS, FREE_STALLS
from support.rig import X, backend, rig

# dynamo warns while it compiles; here that would be an error inside the compiler
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

BROKEN = X.clone()
BROKEN[1, 1] = torch.nan


@pytest.fixture
def compiled() -> Iterator[Any]:
    with backend("aot_eager"), rig(compile="default") as runtime:
        yield lambda: runtime.outcomes()["compile"]


class Whiten(nn.Module):
    """Takes another way where a decomposition fails."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.norm(self.first(x)))
        try:
            root = torch.linalg.cholesky(h.t() @ h + torch.eye(4))
        except RuntimeError:
            root = torch.nan_to_num(h.t() @ h) + torch.rand(4, 4)
        y: Tensor = self.last(root)
        return y


def all_that_a_training_leaves(model: nn.Module) -> list[Any]:
    torch.manual_seed(1)
    random.seed(1)
    losses = []
    for batch in (X, X, BROKEN, X, X, BROKEN):
        loss = model(batch).square().mean()
        losses.append(loss.detach())
        model.zero_grad()
        if batch is X:
            loss.backward()
            losses += [parameter.grad for parameter in model.parameters()]
    return [*losses, *model.buffers(), torch.rand(2), random.random()]


def whiten() -> Whiten:
    torch.manual_seed(0)
    return Whiten()


def test_the_script_takes_its_own_way_out(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = all_that_a_training_leaves(whiten())
    outcome = compiled()
    assert (outcome.state, outcome.counts["repeated calls"]) == (State.APPLIED, 2)
    assert any("Whiten" in note and "LinAlgError" in note for note in outcome.notes)
    with monkeypatch.context() as eager:
        eager.setattr(nn.Module, "__call__", nn.Module._call_impl)
        torch.testing.assert_close(found, all_that_a_training_leaves(whiten()), equal_nan=True)


class Strict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return torch.linalg.cholesky(h.t() @ h + torch.eye(4))  # fails


def test_an_error_has_the_scripts_own_line(compiled: Any) -> None:
    model = Strict()
    model(X).sum().backward()
    with pytest.raises(torch.linalg.LinAlgError) as raised:
        model(-BROKEN)
    lines = Path(__file__).read_text().splitlines()
    last = traceback.extract_tb(raised.tb)[-1].lineno or 0
    assert lines[last - 1].endswith("# fails")
    assert raised.value.__context__ is None
    assert compiled().counts["repeated calls"] == 1


class Leaving(nn.Module):
    """Leaves a batch out, between two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        torch._dynamo.graph_break()
        self.calls += 1
        if not torch.isfinite(h).all():
            raise ValueError("a broken batch")
        y: Tensor = self.layer(h)
        return y


def test_what_the_script_raises_itself_is_not_repeated(compiled: Any) -> None:
    model = Leaving()
    model(X)
    with pytest.raises(ValueError, match="a broken batch"):
        model(BROKEN)
    assert (model.calls, "repeated calls" in compiled().counts) == (2, False)


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = raise_signal(self.layer(x))
        return y


@torch.library.custom_op("fasttrain_tests::raise_signal", mutates_args=())
def raise_signal(x: Tensor) -> Tensor:
    signal.raise_signal(signal.SIGUSR1)
    return x.clone()


raise_signal.register_fake(torch.empty_like)


def test_what_a_handler_raises_is_not_repeated(compiled: Any) -> None:
    came: list[int] = []

    def handler(number: int, _: Any) -> None:
        came.append(number)
        if len(came) == 2:
            raise RuntimeError("time is up")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        model = Interrupted()
        with torch.no_grad():
            model(X)
            with pytest.raises(RuntimeError, match="time is up"):
                model(X)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (len(came), "repeated calls" in compiled().counts) == (2, False)


class Remembering(Whiten):
    """Changes a buffer that is too large to be saved before each call."""

    def __init__(self) -> None:
        super().__init__()
        self.bank: Tensor
        self.register_buffer("bank", torch.zeros(300, 300))

    def forward(self, x: Tensor) -> Tensor:
        self.bank.add_(1)
        return super().forward(x)


def test_a_call_that_cant_be_put_back_is_not_repeated(compiled: Any) -> None:
    model = Remembering()
    model(X)
    with pytest.raises(torch.linalg.LinAlgError):
        model(BROKEN)
    assert "repeated calls" not in compiled().counts


def test_a_model_whose_calls_keep_failing_runs_eagerly(compiled: Any) -> None:
    model = whiten()
    for _ in range(2 * FREE_STALLS):
        model(BROKEN)
    outcome = compiled()
    assert model._compiled_call_impl is None
    assert outcome.counts["repeated calls"] == FREE_STALLS
    assert any(FAILS in note for note in outcome.notes)


# Not in this file, whose asserts pytest rewrites.
ASSERTS = """
import torch

class Asserting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        assert torch.isfinite(y).all(), "non-finite numbers"
        return y.tanh()
"""


def test_an_assert_is_made_outside_of_graphs(compiled: Any, tmp_path: Path) -> None:
    """In one it would raise in a loop, perhaps a parallel one, which aborts the process."""
    script = tmp_path / "train.py"
    script.write_text(ASSERTS)
    model = runpy.run_path(str(script))["Asserting"]()
    model(X).sum().backward()
    with pytest.raises(AssertionError, match="non-finite numbers") as raised:
        model(BROKEN)
    assert traceback.extract_tb(raised.tb)[-1].lineno == 11
    assert "repeated calls" not in compiled().counts
