"""A compilation that the training waits for is ended when it takes too long; nothing else is."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.codecache import LambdaFuture
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fasttrain.shim.compile_auto import auto as auto_module
from fasttrain.shim.compile_auto import foreground
from fasttrain.shim.compile_auto.auto import AutoCompile
from fasttrain.shim.compile_auto.foreground import TimeBox, TooLongError, no_room_on
from fasttrain.shim.compile_auto.peers import NoOthers, Ready
from fasttrain.shim.compile_auto.rule import Choice

OF_FUNCTORCH = {"force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}
OF_INDUCTOR = {"fx_graph_cache": False, "compile_threads": 1}


class Clock:
    """Time that passes by hand, in seconds."""

    now_s = 5.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(foreground, "time", clock)
    return clock


class Ended(TimeBox):
    """A box whose time is up when it is asked for the n-th time; the first is 1."""

    def __init__(self, at: float) -> None:
        super().__init__(math.inf)
        self.at, self.asked, self.by = at, 0, set[str]()

    def _asking(self, function: Any) -> Any:
        asking = super()._asking(function)

        def telling(*args: Any) -> Any:
            self.by.add(function.__qualname__)
            return asking(*args)

        return telling

    def check(self) -> None:
        self.asked += 1
        if self.asked >= self.at:
            self._left_s = 0.0
        super().check()


def compiled_step(net: nn.Module, box: TimeBox) -> list[torch.Tensor]:
    """Return the gradients of a step that is compiled in a box."""
    listeners: list[Any] = []
    torch.compiler.reset()
    with ExitStack() as undo:
        undo.enter_context(torch._dynamo.config.patch(suppress_errors=True))
        undo.enter_context(torch._functorch.config.patch(**OF_FUNCTORCH))
        undo.enter_context(torch._inductor.config.patch(**OF_INDUCTOR))
        box.install(listeners, undo)
        (heard,) = listeners
        heard("Net")
        loss = torch.compile(net)(torch.ones(4, 8)).square().mean()
        heard("")
    assert listeners == []
    return list(torch.autograd.grad(loss, list(net.parameters())))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor's, while imported
def test_one_that_takes_too_long_is_ended_wherever_it_is() -> None:
    """While it traces, and while it lowers the forward and the backward pass."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    loss = net(torch.ones(4, 8)).square().mean()
    eager = list(torch.autograd.grad(loss, list(net.parameters())))
    compiled_step(net, Ended(math.inf))  # the first makes tables for all
    whole = Ended(math.inf)
    torch.testing.assert_close(compiled_step(net, whole), eager)
    assert not whole.over
    assert whole.by == {"PropagateUnbackedSymInts.run_node", "GraphLowering.run_node"}
    for at in (1, whole.asked // 3, 2 * whole.asked // 3, whole.asked):
        box = Ended(at)
        found = compiled_step(net, box)
        assert box.over, at
        assert all(torch.equal(a, b) for a, b in zip(found, eager, strict=True)), at
        assert torch.is_grad_enabled(), at
        assert not torch.is_autocast_enabled("cpu"), at
        assert _get_current_dispatch_mode() is None, at
    again = Ended(math.inf)
    torch.testing.assert_close(compiled_step(net, again), eager)
    assert again.asked == whole.asked, "what was ended has left nothing"


def in_compiler(call: Callable[[], Any]) -> Any:
    """Call a function as if dynamo had called the compiler, and that the function."""
    module, name = foreground.COMPILER_CALL
    names: dict[str, Any] = {"__name__": module, "call": call}
    exec(f"def {name}(): return call()", names)
    return names[name]()


def test_a_wait_for_a_kernel_is_ended(clock: Clock) -> None:
    with ExitStack() as undo:
        box = TimeBox(1.0)
        box.install([], undo)
        box.compiling("Net")
        assert in_compiler(LambdaFuture(lambda: 3).result) == 3
        clock.now_s += 5.0
        assert LambdaFuture(lambda: 3).result() == 3, "no compilation waits for it"
        with pytest.raises(TooLongError):
            in_compiler(LambdaFuture(lambda: 3).result)
    assert in_compiler(LambdaFuture(lambda: 3).result) == 3


def test_compilations_share_the_time(clock: Clock) -> None:
    box = TimeBox(4.0)
    box.compiling("Net")
    clock.now_s += 3.0
    in_compiler(box.check)
    box.compiling("")
    clock.now_s += 100.0  # of training
    in_compiler(box.check)
    box.compiling("Net")
    clock.now_s += 0.5
    box.compiling("Block")  # inside of the other
    clock.now_s += 0.4
    in_compiler(box.check)
    assert not box.over
    clock.now_s += 0.2
    with pytest.raises(TooLongError):
        in_compiler(box.check)
    with pytest.raises(TooLongError):
        in_compiler(box.check)  # should a compiler catch the first
    assert box.over
    box.compiling("")
    in_compiler(box.check)
    box.compiling("Net")
    clock.now_s += 0.1
    with pytest.raises(TooLongError):
        in_compiler(box.check)


def test_the_box_is_the_first_to_hear(clock: Clock) -> None:
    """The others wait, for a rank that compiles."""
    listeners: list[Any] = [lambda _: setattr(clock, "now_s", clock.now_s + 9.0)]
    with ExitStack() as undo:
        box = TimeBox(1.0)
        box.install(listeners, undo)
        for listen in listeners:
            listen("Net")
        with pytest.raises(TooLongError):
            in_compiler(box.check)


@pytest.mark.parametrize(
    ("cpu", "strict", "boxed"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_where_an_error_of_the_compiler_ends_the_run_none_is_raised(
    monkeypatch: pytest.MonkeyPatch, cpu: bool, strict: bool, boxed: bool
) -> None:
    auto: Any = AutoCompile.__new__(AutoCompile)
    auto._shared = SimpleNamespace(plan=SimpleNamespace(strict=strict))
    auto.lever = SimpleNamespace(on_compiling=[])
    monkeypatch.setattr(AutoCompile, "_on_cpu", lambda _: cpu)
    monkeypatch.setattr(AutoCompile, "_allowed_s", lambda *_, **__: 7.0)
    with auto._time_box(0.1) as box:
        assert (box is not None) is boxed
        assert len(auto.lever.on_compiling) == boxed


def test_no_room_on_a_device_leaves_the_run_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    auto: Any = AutoCompile.__new__(AutoCompile)
    auto._others, stayed = NoOthers(), list[str]()
    for name, value in {"_on_cpu": False, "_count_parts": 1, "_devices": set()}.items():
        monkeypatch.setattr(AutoCompile, name, lambda _, value=value: value)
    monkeypatch.setattr(AutoCompile, "_stay", lambda _, why: stayed.append(why))
    monkeypatch.setattr(auto_module, "no_room_on", lambda _: "no memory")
    monkeypatch.setattr(AutoCompile, "_wait", _begins)
    assert list(auto._decide(0.01, Ready(("Net",), ""))) == []
    assert stayed == ["no memory"]


def _begins(*_: Any) -> Any:
    yield from ()
    return Choice("begin", "")


@pytest.mark.parametrize(("free", "told"), [(20, ""), (5, "no memory to run compiled")])
def test_a_device_needs_room(monkeypatch: pytest.MonkeyPatch, free: int, told: str) -> None:
    module = SimpleNamespace(
        mem_get_info=lambda _: (free << 30, 141 << 30),
        memory_reserved=lambda _: 100 << 30,
        max_memory_allocated=lambda _: 90 << 30,
    )
    monkeypatch.setattr(foreground, "module_of", lambda _: module)
    assert told in no_room_on([torch.device("cuda", 0)])
    assert bool(told) == bool(no_room_on([torch.device("cuda", 0)]))


def test_a_device_that_does_not_say_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreground, "module_of", lambda _: SimpleNamespace())
    assert "isn't known" in no_room_on([torch.device("xpu", 0)])
    monkeypatch.undo()
    assert no_room_on([torch.device("cpu")]) == ""


@pytest.mark.parametrize(
    ("device", "strict", "tries"),
    [("cuda", False, True), ("cpu", False, True), ("xpu", False, False), ("cuda", True, False)],
)
def test_where_the_training_waits_for_what_nobody_has_shown_to_pay(
    monkeypatch: pytest.MonkeyPatch, device: str, strict: bool, tries: bool
) -> None:
    auto: Any = AutoCompile.__new__(AutoCompile)
    auto._shared = SimpleNamespace(plan=SimpleNamespace(strict=strict))
    monkeypatch.setattr(AutoCompile, "_devices", lambda _: {torch.device(device)})
    assert auto._tries() is tries
