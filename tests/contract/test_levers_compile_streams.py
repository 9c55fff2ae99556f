"""Random numbers that a compiled forward pass draws, and what counts as compiled."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import random
import re
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

from fasttrain.model.outcome import State
from fasttrain.shim.levers.compile.account import NUMPY_DRAWS
from fasttrain.shim.levers.compile.lever import MADE_AGAIN, NO_GRAPH
from fasttrain.shim.levers.compile.slots import HOOKS_CHANGE
from fasttrain.shim.levers.compile.targets import SPECTRAL_NORM
from support.rig import X, backend, network, rig, train

# dynamo warns while it compiles; here that would be an error inside the compiler
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning"),
]

OWN = random.Random(5)
NOISES: dict[str, Callable[[], Any]] = {
    "numpy's functions": lambda: np.random.normal(0, 1, (3, 4)),
    "a generator of numpy's": np.random.default_rng(3).random,
    "python's functions": random.random,
    "a generator of python's": lambda: OWN.random(),
}


class Noisy(nn.Module):
    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.inner, self.draw = network(), draw

    def forward(self, x: Any) -> Any:
        return self.inner(x) + torch.as_tensor(self.draw())


def drawn_by(name: str) -> list[float]:
    """Train with one kind of noise; give the losses, and what each stream gives next."""
    np.random.seed(0)
    random.seed(0)
    OWN.seed(5)
    draw = np.random.default_rng(3).random if "generator of numpy" in name else NOISES[name]
    return [*train(Noisy(draw)), np.random.rand(), random.random(), OWN.random()]


@pytest.mark.parametrize("name", NOISES)
def test_each_step_draws_from_the_scripts_own_stream(
    compiled: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = drawn_by(name)
    outcome = compiled()
    assert outcome.state is State.APPLIED
    told = any(NUMPY_DRAWS in note for note in outcome.notes)
    assert told == (name == "numpy's functions")
    with monkeypatch.context() as eager:
        eager.setattr(nn.Module, "__call__", nn.Module._call_impl)
        assert found == pytest.approx(drawn_by(name), rel=1e-5)


@functools.lru_cache
def projection(rows: int, columns: int) -> Any:
    return torch.randn(rows, columns)


@functools.cache
def shift(rows: int, columns: int) -> Any:
    return torch.ones(rows, columns) * random.random()


@functools.lru_cache
def mask(rows: int, columns: int) -> Any:
    return torch.ones(rows, columns).tril()


class Tabled(nn.Module):
    """Adds a table, which a function keeps for all calls."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.inner, self.table = network(), table

    def forward(self, x: Any) -> Any:
        return self.inner(x) + self.table(*x.shape)


def trained_with(table: Any) -> list[float]:
    """Train with a table that no call has made yet; give what `drawn_by` does."""
    table.cache_clear()
    random.seed(0)
    return [*train(Tabled(table)), random.random(), torch.rand(()).item()]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("table", [projection, shift, mask])
def test_what_a_function_keeps_is_drawn_once(
    compiled: Any, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trained_with(table)
    outcome = compiled()
    assert outcome.state is State.APPLIED
    assert bool(outcome.counts["breaks"]) == (table is not mask)
    with monkeypatch.context() as eager:
        eager.setattr(nn.Module, "__call__", nn.Module._call_impl)
        assert found == pytest.approx(trained_with(table), rel=1e-5)


def test_a_lazy_module_that_raises_is_left_alone(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if sys._getframe(1).f_code.co_filename == inspect.__file__:  # torch looks through it
                raise AttributeError(name)
            raise ImportError("optional dependency is not installed")

    monkeypatch.setitem(sys.modules, "lazy_optional", Lazy("lazy_optional"))
    train(network())
    assert compiled().state is State.APPLIED


def test_what_runs_under_transforms_alone_is_not_applied(compiled: Any) -> None:
    model = network()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    grad(lambda w: functional_call(model, w, (X,)).square().mean())(weights)
    outcome = compiled()
    assert (outcome.state, outcome.counts["graphs"]) == (State.ARMED, 0)
    assert "torch.func" in outcome.reason


def test_a_spectral_norm_by_hook_runs_eagerly(compiled: Any) -> None:
    losses = []
    for norm in (nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm):
        model = network()
        norm(model[0])
        losses.append(train(model))
        slots = [part._compiled_call_impl for part in model.modules()]
        assert any(slots) == (norm is not nn.utils.spectral_norm)
    assert any(SPECTRAL_NORM in note for note in compiled().notes)


def test_a_spectral_norm_that_comes_later_ends_compilation(compiled: Any) -> None:
    model = network()
    train(model)
    nn.utils.spectral_norm(model[0])
    train(model)
    assert model._compiled_call_impl is None
    assert any(SPECTRAL_NORM in note for note in compiled().notes)


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = kind(4, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.head(self.inner(x)[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_runs_eagerly_and_is_told(compiled: Any, kind: Any) -> None:
    losses = train(Tagger(kind))
    outcome = compiled()
    assert (outcome.state, outcome.counts["graphs"]) == (State.FAILED, 0)
    assert "LSTM" in outcome.reason
    model = Tagger(kind)
    model._compiled_call_impl = model._call_impl
    assert losses == train(model)


def test_a_model_that_cannot_be_compiled_keeps_no_other_from_it(compiled: Any) -> None:
    train(Tagger(nn.LSTM))
    assert compiled().state is State.FAILED
    train(network())
    outcome = compiled()
    assert (outcome.state, outcome.counts["graphs"]) == (State.APPLIED, 1)
    assert any("LSTM" in note for note in outcome.notes)


class Probed(nn.Module):
    """Finds its width by calling its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.width = self.probe(torch.zeros(1, 4)).shape[-1]

    def probe(self, x: Any) -> Any:
        return self.second(self.first(x))

    def forward(self, x: Any) -> Any:
        return self.probe(x).view(-1, self.width)


def test_parts_that_a_constructor_calls_are_no_roots(compiled: Any) -> None:
    train(Probed())
    outcome = compiled()
    assert [site.what for site in outcome.sites] == ["Probed"]
    assert (outcome.counts["targets"], outcome.counts["graphs"]) == (1, 1)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x).square().mean()


def test_a_new_wrapper_at_each_step_is_compiled_no_more(compiled: Any) -> None:
    model = network()
    for _ in range(12):
        Wrapper(model)(X).backward()
    outcome = compiled()
    assert (outcome.state, outcome.counts["targets"]) == (State.APPLIED, 3)
    assert any(f"Wrapper {MADE_AGAIN}" in note for note in outcome.notes)


def test_an_ensemble_and_a_model_per_fold_are_compiled(compiled: Any) -> None:
    ensemble = [network() for _ in range(5)]
    for model in ensemble:
        model(X)
    for _ in range(5):
        train(network(), steps=101)
    assert compiled().counts["targets"] == 10


def test_a_copy_for_each_task_is_compiled_no_more(compiled: Any) -> None:
    model = network()
    for _ in range(8):
        train(copy.deepcopy(model), steps=10)
    assert compiled().counts["targets"] == 3


def test_no_root_is_compiled_after_many_graphs(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fasttrain.shim.levers.compile.lever.MOST_GRAPHS", 2)
    models = [network() for _ in range(4)]
    for model in models:
        model(X)
    outcome = compiled()
    assert (outcome.state, outcome.counts["targets"]) == (State.APPLIED, 2)
    assert any(re.search(r"\b2 graphs\b", note) for note in outcome.notes)


def test_hooks_added_at_each_step_end_compilation(compiled: Any) -> None:
    model, seen = network(), []
    for _ in range(8):
        model[1].register_forward_hook(lambda *_: seen.append(1))
        train(model, 1)
    assert len(seen) == sum(range(9))
    outcome = compiled()
    assert outcome.counts["graphs"] <= 5
    assert any(HOOKS_CHANGE in note for note in outcome.notes)


def test_nothing_is_applied_before_the_first_graph(compiled: Any) -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        @torch.compiler.disable
        def forward(self, x: Any) -> Any:
            self.seen = compiled()
            return self.inner(x)

    model = Looking()
    model(X)
    assert model.seen.state is State.ARMED
    assert model.seen.reason == NO_GRAPH


def test_lazy_modules_are_drawn_by_their_first_call_and_compiled_after_it() -> None:
    def trained() -> Any:
        torch.manual_seed(3)
        parts = nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2)
        model, x = nn.Sequential(*parts), torch.randn(2, 1, 6, 6)
        model(x)
        for _ in range(2):
            model(x).sum().backward()
        return [parameter.detach() for parameter in model.parameters()]

    expected = trained()
    with backend("eager"), rig(compile="default") as runtime:
        found = trained()
        outcome = runtime.outcomes()["compile"]
    assert all(map(torch.equal, found, expected))
    assert (outcome.state, outcome.counts["targets"]) == (State.APPLIED, 1)


class Locked(nn.Module):
    """Has a state of its own for copies, which takes all that is in ``__dict__``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.lock = nn.Linear(4, 4), threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def forward(self, x: Any) -> Any:
        return self.linear(x)


def test_a_copy_computes_with_its_own_weights(compiled: Any) -> None:
    model = Locked()
    model(X)
    average = copy.deepcopy(model)
    for parameter in average.parameters():
        parameter.data.zero_()
    assert average(X).abs().sum() == 0
    pickle.dumps(model)
    assert compiled().state is State.APPLIED
