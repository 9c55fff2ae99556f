"""A root is the outermost module with parameters that the script calls, and nothing else."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fasttrain.shim.hooks import roots as roots_module
from fasttrain.shim.hooks.roots import Root, RootCalls, first_parameter, parameters_of


class Watch:
    """Notes what passes through the roots."""

    def __init__(self, roots: RootCalls) -> None:
        self.roots = roots
        self.found: list[str] = []
        self.called: list[str] = []
        roots.on_discover.append(lambda root, _: self.found.append(root.name))
        roots.on_call.append(lambda root, *_: self.called.append(root.name))


@pytest.fixture
def watch() -> Iterator[Watch]:
    with ExitStack() as undo:
        roots = RootCalls()
        roots.install(undo)
        yield Watch(roots)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.inner(x)


X = torch.ones(3, 2)


def test_a_frozen_root_that_is_thawed_is_told_once(watch: Watch) -> None:
    told: list[str] = []
    watch.roots.on_trainable.append(lambda root, _: told.append(root.name))
    model = Outer().requires_grad_(False)
    model(X)
    model.requires_grad_(True)
    with torch.no_grad():
        model(X)
    assert told == []
    model(X)
    model(X)
    assert told == ["Outer"]
    assert watch.found == ["Outer"]


def test_parameters_of_a_root_that_stays_frozen_are_looked_at_now_and_then(watch: Watch) -> None:
    model = Outer().requires_grad_(False)
    with mock.patch.object(roots_module, "parameters_of", wraps=parameters_of) as looks:
        for _ in range(300):
            model(X)
    assert looks.call_count < 20


def test_only_the_outermost_call_counts(watch: Watch) -> None:
    model = nn.Sequential(Outer(), nn.ReLU())
    model(X)
    model(X)
    assert watch.found == ["Sequential"]
    assert watch.called == ["Sequential", "Sequential"]


class Scaled(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(2, 2, bias=False)

    def forward(self, weight: Any) -> Any:
        return self.scale(weight)


def test_a_weight_that_is_read_is_no_root(watch: Watch) -> None:
    layer = nn.utils.parametrize.register_parametrization(nn.Linear(2, 2), "weight", Scaled())
    assert layer.weight.shape == (2, 2)  # type: ignore[union-attr]
    with nn.utils.parametrize.cached():
        assert layer.weight is layer.weight
    assert watch.called == []
    layer(X)
    assert watch.called == ["ParametrizedLinear"]


def test_parts_that_are_called_one_by_one_are_roots(watch: Watch) -> None:
    model = Outer()
    model.inner(X)
    model(X)
    model.forward(X)
    assert watch.found == ["Linear", "Outer"]
    assert watch.called == ["Linear", "Outer", "Linear"]


def test_tensors_of_a_roots_parameters_can_be_swapped(watch: Watch) -> None:
    model = Outer()
    model(X)
    root = watch.roots.last
    assert root is not None
    first = root.parameter()
    assert first is model.inner.weight
    torch.__future__.set_swap_module_params_on_conversion(value=True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(value=False)
    assert first.dtype is torch.float64
    assert root.parameter() is first
    model.inner = nn.Linear(2, 2)
    assert root.parameter() is model.inner.weight


def test_a_module_without_parameters_is_no_root(watch: Watch) -> None:
    nn.CrossEntropyLoss()(X, torch.tensor([0, 1, 0]))
    assert watch.found == []


def test_a_root_tells_who_it_is(watch: Watch) -> None:
    frozen = nn.Linear(2, 2).requires_grad_(requires_grad=False)
    frozen(X)
    assert watch.roots.last is not None
    assert not watch.roots.last.trainable
    assert watch.roots.last.parameter() is frozen.weight
    assert watch.roots.last.where.split(":")[0].endswith("test_roots.py")
    Outer()(X)
    assert watch.roots.last.trainable


def test_the_parameter_is_found_anew_when_the_model_replaced_it(watch: Watch) -> None:
    model = nn.Linear(2, 2)
    model(X)
    root = watch.roots.last
    assert root is not None
    model.weight = nn.Parameter(torch.zeros(2, 2))
    assert root.parameter() is model.weight


def test_a_module_that_is_gone_is_forgotten(watch: Watch) -> None:
    nn.Linear(2, 2)(X)
    gc.collect()
    root = watch.roots.last
    assert root is not None
    assert root.ref() is None
    assert root.parameter() is None
    nn.Linear(2, 2)(X)
    assert watch.found == ["Linear", "Linear"]


def test_a_module_that_calls_itself(watch: Watch) -> None:
    class Countdown(Outer):
        def forward(self, x: Any, left: int = 2) -> Any:
            return self(self.inner(x), left - 1) if left else x

    Countdown()(X)
    assert watch.called == ["Countdown"]


def test_a_root_inside_another_one(watch: Watch) -> None:
    inner = nn.Linear(2, 2)
    inner(X)
    Outer(inner)(X)
    assert watch.called == ["Linear", "Outer"]


def test_the_region_takes_the_call(watch: Watch) -> None:
    def region(root: Root, call: Any, args: Any, kwargs: Any) -> Any:
        return root.name, call(*args, **kwargs).shape

    watch.roots.region = region
    assert nn.Linear(2, 4)(input=X) == ("Linear", (3, 4))


def test_an_exception_comes_through_and_later_calls_are_roots_again(watch: Watch) -> None:
    class Picky(Outer):
        def forward(self, x: Any) -> Any:
            raise error

    error = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        Picky()(X)
    assert caught.value is error
    Outer()(X)
    assert watch.called == ["Picky", "Outer"]


def test_threads_have_a_call_each(watch: Watch) -> None:
    together = threading.Barrier(2, timeout=20)

    class Meeting(Outer):
        def forward(self, x: Any) -> Any:
            together.wait()  # both are inside now
            return self.inner(x)

    model = Meeting()
    threads = [threading.Thread(target=model, args=(X,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert watch.found == ["Meeting"]
    assert watch.called == ["Meeting", "Meeting"]


def test_a_generator_runs_its_parts_as_roots(watch: Watch) -> None:
    class Stepwise(Outer):
        def forward(self, x: Any) -> Any:
            yield self.inner(x)

    list(Stepwise()(X))
    assert watch.called == ["Stepwise", "Linear"]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_repeats_no_root(watch: Watch, use_reentrant: bool) -> None:
    class Thrifty(Outer):
        def forward(self, x: Any) -> Any:
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

    Thrifty()(X.clone().requires_grad_()).sum().backward()
    assert watch.found == ["Thrifty"]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_traced_call_is_left_alone(watch: Watch) -> None:
    model = Outer()
    model(X)
    watch.roots.region = lambda *_: pytest.fail("a region would be recorded in the trace")
    torch.jit.trace(model, X)
    torch.jit._get_trace_graph(model, (X,))  # what torch.onnx.export calls
    assert watch.called == ["Outer"]


def test_an_exported_part_is_left_alone(watch: Watch) -> None:
    model = Outer()
    model.inner(X)
    watch.roots.region = lambda *_: pytest.fail("a region would be recorded in the graph")
    torch.export.export(model, (X,))
    assert watch.called == ["Linear"]


def test_a_loader_worker_has_no_roots(watch: Watch) -> None:
    with mock.patch.object(roots_module, "get_worker_info", return_value="a worker"):
        nn.Linear(2, 2)(X)
    assert watch.found == []


def test_functional_call_with_other_weights(watch: Watch) -> None:
    model = nn.Linear(2, 1, bias=False)
    zeros = {"weight": torch.zeros(1, 2)}
    assert torch.func.functional_call(model, zeros, (X,)).sum() == 0
    assert watch.called == ["Linear"]


def test_parameters_past_a_method_of_the_script(watch: Watch) -> None:
    class Grouped(Outer):
        def parameters(self, group: str) -> Any:  # type: ignore[override]
            raise AssertionError(group)

    model = Grouped()
    model(X)
    assert list(parameters_of(model)) == [model.inner.weight, model.inner.bias]


def test_the_first_floating_parameter() -> None:
    model = Outer()
    model.index = nn.Parameter(torch.tensor([1]), requires_grad=False)
    assert first_parameter(model) is model.inner.weight
    assert first_parameter(nn.ReLU()) is None


def test_module_call_is_put_back() -> None:
    before = nn.Module.__call__
    with ExitStack() as undo:
        RootCalls().install(undo)
        assert nn.Module.__call__ is not before
    assert nn.Module.__call__ is before


def test_a_compiler_traces_the_modules_and_nothing_around_them(watch: Watch) -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    seen = []

    def part(module: nn.Module, args: Any, kwargs: Any) -> Any:
        seen.append(type(module).__name__)
        return module._call_impl(*args, **kwargs)

    watch.roots.inside.part = part
    compiled(X)
    assert seen == ["OptimizedModule"]


class Fails(nn.Module):
    """Raises inside of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Any) -> Any:
        return self.inner(x)


@pytest.mark.parametrize("amp", ["off", "bfloat16"])
def test_a_traceback_has_the_lines_that_it_has_without_levers(rig: Any, amp: str) -> None:
    def names() -> list[str]:
        with pytest.raises(RuntimeError) as caught:
            Fails()(torch.ones(1, 3))
        steps = traceback.extract_tb(caught.tb)
        return [step.name for step in steps if "fasttrain" not in step.filename]

    plain = names()
    assert plain.count("_wrapped_call_impl") == 3
    with rig(amp=amp, compile="auto"):
        assert names() == plain


class Deeper(nn.Module):
    """Calls another module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x)


def test_modules_are_called_as_deep_as_without_levers(rig: Any) -> None:
    before, limit = sys.getrecursionlimit(), 600
    sys.setrecursionlimit(limit)
    try:
        nested: list[nn.Module] = [nn.Linear(1, 1)]
        for _ in range(limit):
            nested.append(Deeper(nested[-1]))
        with contextlib.suppress(RecursionError):
            for depth in range(limit):
                nested[depth](torch.ones(1))
        with rig(amp="bfloat16", compile="auto"):
            nested[depth - 1](torch.ones(1))
            assert sys.getrecursionlimit() == limit
            with pytest.raises(RecursionError):
                nested[-1](torch.ones(1))
        assert sys.getrecursionlimit() == limit
    finally:
        sys.setrecursionlimit(before)


def test_the_script_sets_a_recursion_limit_of_its_own(rig: Any) -> None:
    before = sys.getrecursionlimit()
    with rig(compile="auto"):
        for limit in (3000, 2**31 - 1):
            sys.setrecursionlimit(limit)
            assert sys.getrecursionlimit() == limit
        for wrong in (0, -1, 2**31, "1", 1.5):
            with pytest.raises((ValueError, OverflowError, TypeError)):
                sys.setrecursionlimit(wrong)
        sys.setrecursionlimit(before + 1)
    assert sys.getrecursionlimit() == before + 1
    sys.setrecursionlimit(before)
