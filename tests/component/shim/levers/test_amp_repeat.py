"""A call that fails in low precision and not without it is repeated, and its root left alone."""

from __future__ import annotations

import copy
import random
import re
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fasttrain.launch.receipts import unmet
from fasttrain.model.outcome import RankReport, State, StepStats
from fasttrain.shim.hooks.call_state import one_line
from fasttrain.shim.levers.amp.rules import LEAST_FLOPS
from fasttrain.shim.process import refusal

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Scatter(nn.Module):
    """A graph network's: messages are added into fp32."""

    def forward(self, x: Any) -> Any:
        return torch.zeros(3, 4).index_add_(0, torch.tensor([0, 1, 1]), x)  # scatter


class Lerp(nn.Module):
    """A buffer that follows what comes along."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


class Checked(nn.Module):
    """A check of the script's own."""

    def forward(self, x: Any) -> Any:
        assert x.dtype is torch.float32
        return x


class Observed(nn.Module):
    """Quantization-aware training: a buffer gets its size in the first call."""

    def __init__(self, after: nn.Module | None = None) -> None:
        super().__init__()
        self.register_buffer("low", torch.empty(0))
        self.after = after or nn.Identity()

    def forward(self, x: Any) -> Any:
        low = x.detach().amin(0)
        if not self.low.numel():
            self.low.resize_(low.shape).copy_(low)
        self.low.copy_(torch.minimum(self.low, low))
        return self.after(x)


class Restless(nn.Module):
    """Changes whatever a forward can change, and then fails."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.last = last
        self.calls = 0
        self.seen: list[float] = []

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self.seen.append(random.random())
        return self.last(x + float(np.random.rand()) + 0.1 * self.calls + self.seen[-1])


def model(last: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), Restless(nn.Linear(4, 4)), last
    )


def train(network: nn.Module, steps: int = 5) -> list[Any]:
    """Return all that a run leaves: losses, parameters, buffers, attributes, random numbers."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        loss = network(X).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    restless = next(part for part in network.modules() if isinstance(part, Restless))
    left = [tensor.tolist() for tensor in network.state_dict().values()]
    drawn = [torch.rand(1).item(), random.random(), float(np.random.rand())]
    return [losses, left, restless.calls, restless.seen, drawn]


@pytest.mark.parametrize("last", [Scatter, Lerp, Checked, lambda: Observed(Scatter())])
def test_a_repeated_call_is_that_of_the_script_alone(rig: Any, last: Any) -> None:
    alone = train(model(last()))
    with rig(amp="bfloat16") as runtime:
        assert train(model(last())) == alone
        outcome = runtime.outcomes()["amp"]
    assert outcome.state is State.SKIPPED
    assert re.search(r"\w+Error: .*\(.*test_amp_repeat\.py:\d+\)", outcome.reason), outcome.reason
    assert outcome.counts == {}


def test_a_buffer_may_change_its_size(amp: Any) -> None:
    network = model(Observed())
    train(network)
    assert network[-1].low.shape == (4,)
    assert amp().state is State.APPLIED


def test_the_receipt_names_the_line(amp: Any) -> None:
    train(model(Scatter()))
    lines = Path(__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if text.endswith("# scatter"))
    assert f"test_amp_repeat.py:{line})" in amp().reason
    assert re.search(r"\bbfloat16\b.*\bfp32\b.*: RuntimeError: index_add_", amp().reason)


def test_a_long_message_shows_that_it_was_cut() -> None:
    words = one_line(RuntimeError("word " * 100 + "\nsecond line"))
    assert words.startswith("RuntimeError: word word")
    assert words.endswith("word ...")
    assert one_line(RuntimeError("word\nsecond line")) == "RuntimeError: word"


def test_other_roots_stay_in_low_precision(amp: Any) -> None:
    good = nn.Linear(4, 4)
    for _ in range(2):
        model(Scatter())(X)
        assert torch.equal(good(X), good(X).bfloat16().float())
    outcome = amp()
    assert outcome.state is State.APPLIED
    assert outcome.counts == {"forwards": 4}
    report = RankReport(0, "cpu", "", (outcome,), StepStats())
    (sentence,) = unmet((report,))  # which --strict makes an error
    assert re.match(r"rank 0: amp bfloat16 .* Sequential \(", sentence)


def test_a_default_that_was_left_is_no_warning(
    rig: Any, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LEAST_FLOPS, "cpu", 0)
    alone = train(model(Scatter()))
    with rig(machine, amp="bfloat16") as runtime:
        assert train(model(Scatter())) == alone
        report = RankReport(0, "cpu", "", (runtime.outcomes()["amp"],), StepStats())
    assert "index_add_" in report.outcomes[0].missed[0]
    assert unmet((report,)) == []


def test_a_failure_late_in_training(rig: Any) -> None:
    """Buffers and torch's random numbers are put back at any call."""

    class Late(nn.Module):
        late = False

        def forward(self, x: Any) -> Any:
            return Scatter()(x) if self.late else x

    late = Late()
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), late)
    with rig(amp="bfloat16") as runtime:
        for _ in range(9):
            network(X)
        twin, state = copy.deepcopy(network), torch.get_rng_state()
        late.late = twin[3].late = True
        output = network(X)
        assert runtime.outcomes()["amp"].state is State.APPLIED
    torch.set_rng_state(state)
    assert torch.equal(output, twin(X))
    for buffer, expected in zip(network.buffers(), twin.buffers(), strict=True):
        assert torch.equal(buffer, expected)


def test_the_scripts_own_error_is_the_scripts(amp: Any) -> None:
    network = model(nn.Linear(5, 5))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
            network(X)
        assert caught.value.__context__ is None
        assert caught.value.__cause__ is None
    assert network[1].num_batches_tracked.item() == 2
    assert amp().state is State.ARMED


def test_an_exception_of_the_scripts_own_class_is_no_failure(amp: Any) -> None:
    class EnoughError(RuntimeError):
        pass

    class Leaving(nn.Linear):
        calls = 0

        def forward(self, x: Any) -> Any:
            Leaving.calls += 1
            raise EnoughError

    with pytest.raises(EnoughError):
        Leaving(4, 4)(X)
    assert Leaving.calls == 1


def test_an_input_that_was_changed_is_not_taken_twice(amp: Any) -> None:
    class InPlace(Scatter):
        def forward(self, x: Any) -> Any:
            return super().forward(nn.functional.linear(x.add_(1), self.weight))

    network = InPlace()
    network.weight = nn.Parameter(torch.eye(4))
    x = X.clone()
    with pytest.raises(RuntimeError, match="index_add_") as caught:
        network(x)
    assert torch.equal(x, X + 1)
    refusal.failed(caught.value)  # as when it ends the script
    assert "--amp off" in caught.value.__notes__[0]


REFUSED = {
    "to satisfy the constraint Simplex(), but found invalid values": True,
    "probabilities do not sum to 1": True,
    "probability tensor contains either `inf`, `nan` or element < 0": True,
    "Matrix is not positive definite": True,
    "loss is not finite": True,
    "UNIQUE constraint failed: runs.id": False,
    "could not convert string to float: 'x'": False,
    "information is missing": False,
}


@pytest.mark.parametrize("words", REFUSED)
def test_an_error_about_numbers_that_ends_the_script_names_the_precision(
    amp: Any, words: str
) -> None:
    nn.Linear(4, 4)(X)
    error = ValueError(words)
    refusal.failed(error)
    assert bool(getattr(error, "__notes__", ())) is REFUSED[words]


def test_an_error_where_nothing_ran_in_low_precision_names_none(amp: Any) -> None:
    error = ValueError("probabilities do not sum to 1")
    refusal.failed(error)
    assert not hasattr(error, "__notes__")


def test_what_a_script_raises_to_skip_a_batch_is_not_repeated(amp: Any) -> None:
    class Reading(nn.Linear):
        def forward(self, source: Any) -> Any:
            sample = next(source)
            if sample is None:
                raise ValueError("a bad sample")
            return super().forward(sample)

    model, source = Reading(4, 4), iter([torch.ones(2, 4), None, torch.ones(2, 4)])
    model(source)
    with pytest.raises(ValueError, match="a bad sample"):
        model(source)
    model(source)
    assert (amp().counts["forwards"], amp().missed) == (2, ())


def test_what_a_script_raises_about_types_is_repeated(amp: Any) -> None:
    class Checked(nn.Linear):
        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            if y.dtype is not torch.float32:
                raise ValueError("float32 is expected")
            return y

    Checked(4, 4)(torch.ones(2, 4))
    assert "float32 is expected" in amp().missed[0]


def test_graphs_of_earlier_calls_outlive_a_repeat(amp: Any) -> None:
    class Late(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: Any, last: bool) -> Any:
            y = super().forward(x)
            if last:
                y = torch.zeros(2, 4).index_add(0, torch.arange(2), y)
            return y * self.scale

    model = Late()
    first = model(torch.ones(2, 4), False)
    (first + model(torch.ones(2, 4), True)).sum().backward()
    assert model.weight.grad is not None
    assert amp().missed


def test_deques_dictionaries_and_what_the_failed_call_kept_are_put_back(amp: Any) -> None:
    class Queueing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.queue, self.counts = deque([1, 2]), {"calls": 0}

        def forward(self, x: Any) -> Any:
            self.queue.popleft()
            self.counts["calls"] += 1
            return torch.zeros(2, 4).index_add(0, torch.arange(2), super().forward(x))

    model = Queueing()
    model(torch.ones(2, 4))
    assert (list(model.queue), model.counts) == ([2], {"calls": 1})
    assert amp().missed
