"""Roots that bf16 is left out of by rules, where nobody asked for it by name."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fasttrain.model.outcome import State
from fasttrain.shim.hooks.roots import Root
from fasttrain.shim.levers.amp.rules import (
    JUDGING,
    LEAST_FLOPS,
    Products,
    Rules,
    least_flops,
)

X = torch.linspace(-1, 1, 64 * 8).reshape(64, 8)
LARGE = torch.linspace(-1, 1, 64 * 256).reshape(64, 256)


@pytest.fixture
def auto(rig: Any, machine: Any) -> Iterator[Any]:
    with rig(machine, amp="bfloat16") as runtime:
        yield lambda: runtime.outcomes()["amp"]


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LEAST_FLOPS, "cpu", 0)


class Layer(nn.Linear):
    """Knows in which precision it computed."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        super().__init__(width, width)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        self.seen.append(y.dtype)
        return y

    @property
    def low(self) -> list[bool]:
        return [dtype is torch.bfloat16 for dtype in self.seen]


def train(
    model: Any, x: Any, calls: Callable[[int], int], steps: int = 4, **kind: Any
) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        sum(model(x).square().mean() for _ in range(calls(step))).backward()
        optimizer.step()
    return [p.tolist() for p in model.parameters()]


def test_a_small_model_trains_as_the_script_alone(rig: Any, machine: Any) -> None:
    alone = train(Layer(8), X, lambda _: 1)
    with rig(machine, amp="bfloat16") as runtime:
        assert train(Layer(8), X, lambda _: 1) == alone
        outcome = runtime.outcomes()["amp"]
    assert outcome.state is State.SKIPPED
    assert " 8,192 operations " in outcome.reason  # 2 * 64 * 8 * 8
    assert outcome.notes == ()  # it is said once


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have all roots be on one of two GPUs, as far as the lever can tell: an A100 and a T4."""
    capability = {torch.device("cuda:0"): (8, 0), torch.device("cuda:1"): (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability.__getitem__)

    def put_on(device: str) -> None:
        parameter = SimpleNamespace(dtype=torch.float32, device=torch.device(device))
        monkeypatch.setattr(Root, "parameter", lambda _: parameter)

    return put_on


def test_a_gpu_that_the_plan_did_not_look_at_may_lack_bf16(
    rig: Any, machine: Any, two_gpus: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LEAST_FLOPS, "cuda", 0)
    two_gpus("cuda:1")
    with rig(machine, amp="bfloat16", device="cuda") as runtime:
        model = Layer(8).requires_grad_(False)  # no step of its is awaited
        model(X)
        outcome = runtime.outcomes()["amp"]
        assert outcome.state is State.SKIPPED
        assert "cuda:1" in outcome.reason
        two_gpus("cuda:0")
        model(X)  # which is judged
        # torch says that autocast is entered for a GPU, and that there is none.
        with pytest.warns(UserWarning, match="CUDA is not available"):
            model(X)
        assert runtime.outcomes()["amp"].counts == {"forwards": 1}


@pytest.mark.parametrize(
    ("capability", "multiprocessors", "least"),
    [((9, 0), 132, 2**31), ((8, 0), 108, 2**30), ((8, 6), 16, 2**28)],
)
def test_a_gpu_with_fewer_lanes_gains_by_smaller_products(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], multiprocessors: int, least: int
) -> None:
    """An H200, where 2^31 operations lose and 2^33 gain, an A100 and a small one."""
    major, minor = capability
    found = SimpleNamespace(major=major, minor=minor, multi_processor_count=multiprocessors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    assert least < least_flops(torch.device("cuda", 0)) < 4 * least


def test_bf16_by_name_is_taken_on_any_gpu(rig: Any, two_gpus: Callable[[str], None]) -> None:
    two_gpus("cuda:1")
    with rig(amp="bfloat16", device="cuda"), pytest.warns(UserWarning, match="CUDA is not"):
        Layer(8)(X)


def test_a_step_of_another_thread_judges_no_call_that_goes_on(auto: Any) -> None:
    class Overtaken(Layer):
        def forward(self, x: Any) -> Any:
            if not self.seen:
                other = threading.Thread(target=train, args=(Layer(8), X, lambda _: 1))
                other.start()
                other.join()
            return super().forward(x)

    model = Overtaken(8)
    train(model, X, lambda _: 1)
    assert not any(model.low)
    assert "8,192 operations" in auto().reason


class Found(Exception):  # noqa: N818 - no error
    """Ends a forward with the features that a hook was put there for."""


def test_a_model_whose_calls_a_hook_ends_is_judged_by_what_it_has_computed(auto: Any) -> None:
    def end(module: Any, inputs: Any, output: Any) -> None:
        raise Found

    inner = Layer(256).requires_grad_(False)
    inner.register_forward_hook(end)
    features = nn.Sequential(inner, nn.Linear(256, 256)).requires_grad_(False)
    for _ in range(3):
        with pytest.raises(Found):
            features(LARGE)
    assert inner.low == [False, True, True]


@pytest.mark.parametrize("width", [8, 256])
def test_a_root_that_was_frozen_at_first_is_judged_by_its_steps(auto: Any, width: int) -> None:
    model, x = Layer(width).requires_grad_(False), LARGE[:, :width]
    model(x)  # as a discriminator in the generator's step
    model.requires_grad_(True)
    train(model, x, lambda _: 1)
    assert model.low == [False, False, *[width == 256] * 3]


@pytest.mark.skipif(
    not hasattr(TorchDispatchMode, "ignore_compile_internals"), reason="an older torch"
)
@pytest.mark.parametrize("width", [8, 256])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_model_under_transforms_is_judged_by_its_products(
    auto: Any, width: int, mapped: bool
) -> None:
    model, x = Layer(width), LARGE[:, :width]
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: Any, x: Any) -> Any:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    gradient = torch.func.grad(loss)
    if mapped:
        gradient = torch.func.vmap(gradient, (None, 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        gradient(weights, x)
        optimizer.step()
    assert auto().counts.get("forwards", 0) == (2 if width == 256 else 0)


def test_a_large_one_takes_bf16_from_its_second_step_on(auto: Any) -> None:
    model = Layer(256)  # 2 * 64 * 256 * 256 is 1 << 23
    train(model, LARGE, lambda _: 1)
    assert model.low == [False, True, True, True]
    assert auto().counts == {"forwards": 3}
    with torch.no_grad():
        model(LARGE)
    assert model.low[-1]


def test_by_name_the_rules_are_not_asked(amp: Any) -> None:
    model = Layer(8)
    train(model, X, lambda step: 10 + step)
    assert all(model.low)


def test_ever_more_calls_in_a_step(auto: Any, any_size: None) -> None:
    model = Layer(8)
    train(model, X, lambda step: 20 + 6 * step)
    assert not any(model.low)
    assert re.search(r"\b21 times\b.*\b20\b", auto().reason)


def test_more_calls_after_many_alike(auto: Any, any_size: None) -> None:
    """It is left in the middle of the step: a solver may take a hundred times more."""
    model = Layer(8)
    train(model, X, lambda step: 12 if step < 5 else 500, steps=6)
    low = model.low
    assert low[:36] == [False] * 36
    assert low[36 : 5 * 12 + 12] == [True] * 36
    assert not any(low[5 * 12 + 12 :])
    assert auto().state is State.APPLIED
    assert any(re.search(r"\b13 times\b.*\b12\b", note) for note in auto().notes)


@pytest.mark.parametrize("calls", [lambda step: 1 + step % 8, lambda _: 20])
def test_few_calls_or_always_as_many(auto: Any, any_size: None, calls: Any) -> None:
    model = Layer(8)
    train(model, X, calls, steps=6)
    assert model.low[-1]
    assert auto().state is State.APPLIED


@pytest.fixture
def not_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin in bf16, as on a GPU, where fp32 may not fit."""
    history = Rules.history
    monkeypatch.setattr(Rules, "history", lambda self, root, _: history(self, root, "cuda"))


def test_what_is_small_is_left_after_its_first_step(auto: Any, not_on_a_cpu: None) -> None:
    model = Layer(8)
    train(model, X, lambda _: 2)
    assert model.low == [True] * 2 + [False] * 6
    assert " 8,192 operations " in "".join(auto().notes)


def test_without_a_step_a_few_calls_are_low(auto: Any, not_on_a_cpu: None) -> None:
    """A loop that makes its updates by hand has none."""
    model = Layer(256)
    for _ in range(10):
        model(LARGE)
    assert model.low == [True] * 8 + [False] * 2


@pytest.mark.parametrize("low", [False, True])
def test_a_line_search(auto: Any, any_size: None, low: bool, request: Any) -> None:
    if low:
        request.getfixturevalue("not_on_a_cpu")
    model = Layer(8)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (model(X) - 1).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        assert not any(model.low)
    assert "LBFGS" in auto().reason


def test_without_a_step_nothing_shows_how_it_is_called(auto: Any) -> None:
    model = Layer(256)
    model(LARGE)
    assert model.low == [False]
    assert auto().state is State.SKIPPED
    assert JUDGING in auto().reason


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("width", "low"), [(8, [False] * 3), (256, [False, True, True])])
def test_a_target_network_is_judged_by_its_first_call(
    auto: Any, not_on_a_cpu: None, frozen: bool, width: int, low: list[bool]
) -> None:
    target = Layer(width).requires_grad_(not frozen)
    for _ in range(3):
        with torch.no_grad():
            target(X if width == 8 else LARGE)
    assert target.low == low
    left = JUDGING not in auto().reason and "operations" in auto().reason
    assert left is (width == 8)


def teach(teacher: Any, calls: Callable[[int], int], steps: int = 4) -> list[int]:
    """Train another model, and return how often the teacher was in bf16 in each step."""
    student = Layer(256)
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-3)
    found = []
    for step in range(steps):
        before = sum(teacher.low)
        with torch.no_grad():
            aims = [teacher(LARGE[:, : teacher.in_features]) for _ in range(calls(step))]
        optimizer.zero_grad()
        (student(LARGE) - aims[-1].mean()).square().mean().backward()
        optimizer.step()
        found.append(sum(teacher.low) - before)
    return found


def test_a_teacher_on_a_cpu_takes_bf16_from_the_second_step_on(auto: Any) -> None:
    """Its parameters require gradients, and it is called under no_grad alone."""
    assert teach(Layer(256), lambda _: 2) == [0, 2, 2, 2]
    assert auto().notes == ()


def test_a_small_teacher_on_a_cpu_is_left(auto: Any) -> None:
    assert teach(Layer(8), lambda _: 2) == [0] * 4
    assert any("operations" in note for note in auto().notes)


@pytest.mark.parametrize(
    ("calls", "low"),
    [(lambda _: 9, [0] * 4), (lambda step: (2, 2, 9, 2)[step], [0, 2, 8, 0])],
)
def test_without_gradients_a_solver_may_call(auto: Any, calls: Any, low: list[int]) -> None:
    assert teach(Layer(256), calls) == low
    assert any(re.search(r"\b9 times without gradients\b", note) for note in auto().notes)


def test_what_was_called_without_gradients_is_trained_after_it(auto: Any) -> None:
    model = Layer(256)
    teach(model, lambda _: 9, steps=2)
    train(model, LARGE, lambda _: 1)
    assert model.low[18:] == [False, True, True, True]
    assert auto().notes == ()


def test_a_trial_without_gradients_does_not_judge_a_model(auto: Any, not_on_a_cpu: None) -> None:
    model = Layer(256)
    with torch.no_grad():
        model(LARGE[:1])
        model(LARGE[:1])
    train(model, LARGE, lambda _: 1)
    assert model.low == [False, False, True, True, True, True]
    assert auto().notes == ()


@pytest.mark.parametrize("begins_low", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_trial_with_one_row_does_not_judge_a_model(
    auto: Any, begins_low: bool, training: bool, request: Any
) -> None:
    """Many scripts print the shape of what their model returns."""
    if begins_low:
        request.getfixturevalue("not_on_a_cpu")
    model = Layer(256).train(training)
    model(LARGE[:1])
    train(model.train(), LARGE, lambda _: 1, steps=3)
    assert model.low == [begins_low] * 2 + [True] * 2
    assert auto().notes == ()


def test_of_several_small_calls_the_last_is_named(auto: Any) -> None:
    model = Layer(8)
    model(X[:1])
    train(model, X, lambda _: 1)
    assert not any(model.low)
    assert " 8,192 operations " in auto().reason


def test_an_evaluation_with_gradients_is_no_part_of_a_step(auto: Any) -> None:
    model = Layer(256)
    for _ in range(3):
        train(model.train(), LARGE, lambda _: 1, steps=2)
        model.eval()
        for _ in range(12):
            model(LARGE)
    assert model.low == [False] + [True] * (3 * 14 - 1)
    assert auto().notes == ()


def test_an_evaluation_before_the_first_step_is_in_fp32_on_a_cpu(auto: Any) -> None:
    model = Layer(256)
    model(LARGE)
    model.eval()(LARGE)
    assert model.low == [False] * 2


def test_a_model_that_is_trained_in_evaluation_mode_is_counted(auto: Any, any_size: None) -> None:
    model = Layer(8).eval()
    train(model, X, lambda step: 20 + 6 * step)
    assert not any(model.low)
    assert re.search(r"\b21 times\b.*\b20\b", auto().reason)


def test_what_a_call_that_failed_was_left_for_is_still_said_after_the_step(
    auto: Any, not_on_a_cpu: None
) -> None:
    class Strict(Layer):
        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            assert y.dtype is torch.float32, "needs float32"
            return y

    train(Strict(8), X, lambda _: 1)
    assert "needs float32" in auto().reason


def test_many_calls_in_the_first_step_are_not_all_low(
    auto: Any, any_size: None, not_on_a_cpu: None
) -> None:
    model = Layer(8)
    train(model, X, lambda _: 20, steps=1)
    assert model.low == [True] * 8 + [False] * 12
    assert JUDGING in "".join(auto().notes)
    train(model, X, lambda _: 20, steps=3)
    assert all(model.low[-20:])
    assert auto().notes == ()


def test_what_is_learnt_goes_into_a_snapshot(rig: Any, machine: Any, any_size: None) -> None:
    states = []
    for _ in range(2):
        with rig(machine, amp="bfloat16") as runtime:
            lever = runtime._lever_state.states["amp"]
            models = [Layer(8), Layer(8)]
            for model, calls in zip(models, (1, 30), strict=True):
                model(X)
                if states:
                    continue
                train(model, X, lambda _, calls=calls: calls, steps=2)
                train(model, X, lambda step, calls=calls: calls + 5 * (step // 3), steps=4)
            if states:
                lever.restore(states[0])
                assert lever.state() == states[0]
                assert [model(X) is not None and model.low[-1] for model in models] == [True, False]
            states.append(lever.state())


def test_counting_disturbs_nothing() -> None:
    layers = [nn.Linear(4, 4), nn.Dropout(), nn.LSTM(4, 4)]
    results = []
    for mode in (False, True):
        torch.manual_seed(0)
        with Products() if mode else torch.enable_grad() as products:
            results.append(layers[2](layers[1](layers[0](X[:, :4])))[0])
    assert torch.equal(*results)
    linear, lstm = 2 * 64 * 4 * 4, 2 * 64 * (16 * 4 + 16 * 4)  # 64 steps of one sequence
    assert products.mean() == (linear + lstm) / 2


def test_a_recurrent_layer_of_a_gpu_is_not_known() -> None:
    """Its operator is not here: a function stands for it that has its name."""
    products = Products()
    standin = mock.Mock(_overloadpacket=torch.ops.aten._cudnn_rnn)
    products.__torch_dispatch__(standin, ())
    assert products.mean() is None
    products.__torch_dispatch__(torch.ops.aten.mm.default, (), (torch.eye(2), torch.eye(2)))
    assert products.mean() is None


@pytest.mark.parametrize("begins_low", [False, True])
def test_a_formula_that_refuses_a_shape_ends_no_call(
    auto: Any, monkeypatch: pytest.MonkeyPatch, begins_low: bool, request: Any
) -> None:
    """As that for attention whose keys have fewer heads does, up to torch 2.11, on a GPU."""
    if begins_low:
        request.getfixturevalue("not_on_a_cpu")
    refused = []

    def refuses(*_: Any, **__: Any) -> int:  # a mock would keep the tensors that it was called with
        refused.append(True)
        raise AssertionError

    monkeypatch.setitem(flop_counter.flop_registry, torch.ops.aten.addmm, refuses)
    model = Layer(8)
    train(model, X, lambda _: 1)
    assert refused
    assert model.low == [begins_low, True, True, True]  # its size isn't known
    assert auto().notes == ()


def test_a_small_recurrent_model_trains_as_the_script_alone(rig: Any, machine: Any) -> None:
    class Lstm(nn.LSTM):
        def forward(self, x: Any) -> Any:
            return super().forward(x)[0]

    def alone() -> list[Any]:
        torch.manual_seed(0)
        return train(Lstm(8, 8), X, lambda _: 1)

    expected = alone()
    with rig(machine, amp="bfloat16") as runtime:
        assert alone() == expected
        assert "65,536 operations" in runtime.outcomes()["amp"].reason  # 2 * 64 * (32 * 8 + 32 * 8)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_a_part_that_the_script_compiles(auto: Any, any_size: None) -> None:
    class Outer(Layer):
        def forward(self, x: Any) -> Any:
            return tanh(super().forward(x))

    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def tanh(x: Any) -> Any:
        return x.tanh()

    model = Outer(8)
    train(model, X, lambda _: 1)
    assert model.low == [False, True, True, True]
    assert len(graphs) == 2  # one for each precision
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_a_model_that_compiles_its_own_forward_is_counted(auto: Any) -> None:
    class Compiled(Layer):
        @torch.compile(backend="aot_eager")
        def forward(self, x: Any) -> Any:
            return nn.functional.linear(x, self.weight).tanh()

    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    train(Compiled(8), X, lambda _: 1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    assert " 8,192 operations " in auto().reason
    torch._dynamo.reset()


def test_an_older_torch_does_not_count_where_dynamo_is(
    auto: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(TorchDispatchMode, "ignore_compile_internals")
    monkeypatch.setitem(sys.modules, "torch._dynamo", torch.nn)
    model = Layer(8)
    with mock.patch.object(Products, "__init__", side_effect=AssertionError):
        model(X)
    assert len(model.seen) == 1


def test_a_checkpoint_repeats_in_the_precision_of_its_forward_pass(
    auto: Any, any_size: None
) -> None:
    generator, critic = Layer(8), nn.Linear(8, 1)
    with set_checkpoint_early_stop(enable=False):
        loss = critic(checkpoint(generator, X, use_reentrant=False)).mean()
    torch.optim.SGD(critic.parameters()).step()  # after which the generator is lowered
    loss.backward()
    assert generator.low == [False, False]
    generator(X)
    assert generator.low[-1]
    assert auto().state is State.APPLIED


def test_a_checkpoint_repeats_calls_from_before_the_model_was_left(
    auto: Any, any_size: None
) -> None:
    model = Layer(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for calls in (4, 4, 12, 2):
        model.seen.clear()
        h = X.clone().requires_grad_()
        with set_checkpoint_early_stop(enable=False):
            for _ in range(calls):
                h = checkpoint(model, h, use_reentrant=False).tanh()
        h.square().mean().backward()
        assert model.low[calls:] == model.low[:calls][::-1]
        optimizer.step()
    assert model.low == [False] * 4
    assert any(" 9 times " in note for note in auto().notes)


class Lift(Layer):
    """Turns points by what comes with the data; has features, too."""

    def __init__(self, island: bool = False) -> None:
        super().__init__(256)
        self.island = island

    def forward(self, x: Any) -> Any:
        points, turns = X[:, :3].reshape(8, 8, 3), torch.eye(3).expand(8, 3, 3)
        with torch.autocast("cpu", enabled=False) if self.island else nullcontext():
            turned = points @ turns  # coordinates
        return super().forward(x) + turned.sum()


def test_a_product_of_coordinates_is_told_with_its_line(auto: Any) -> None:
    train(Lift(), LARGE, lambda _: 1)
    (note,) = auto().notes
    text = Path(__file__).read_text().splitlines()
    line = 1 + next(at for at, row in enumerate(text) if row.endswith("# coordinates"))
    assert f"test_amp_rules.py:{line})" in note
    assert auto().state is State.APPLIED


class Narrow(Layer):
    """Multiplies by weights of few columns, and has few tokens that attend to each other."""

    def __init__(self) -> None:
        super().__init__(256)
        self.of_points, self.turn = nn.Linear(3, 4, bias=False), nn.Parameter(torch.eye(3))

    def forward(self, x: Any) -> Any:
        points = X[:, :3].reshape(8, 8, 3)
        queries = super().forward(x).view(64, 4, 64)
        attended = (queries @ queries.mT).softmax(-1) @ queries
        return self.of_points(points).sum() + (points @ self.turn).sum() + attended


@pytest.mark.parametrize("make", [partial(Lift, island=True), Narrow, partial(Layer, 256)])
def test_other_products_are_not_taken_for_such(auto: Any, make: Any) -> None:
    train(make(), LARGE, lambda _: 1)
    assert auto().notes == ()


def test_a_model_that_is_left_multiplies_its_coordinates_in_fp32(auto: Any) -> None:
    class Small(Lift):
        def forward(self, x: Any) -> Any:
            return Layer.forward(self, x[:1]) + (X[:, :3] @ torch.eye(3)).sum()

    train(Small(), LARGE, lambda _: 1)
    assert auto().state is State.SKIPPED
    assert auto().notes == ()
