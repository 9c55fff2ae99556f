"""A signal that comes while dynamo compiles does what it does at any other time."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from fasttrain.model.outcome import State
from fasttrain.shim.hooks.roots import Root
from fasttrain.shim.levers.compile.lever import CompileLever
from support.rig import X, backend, network, rig

SIGNAL = signal.SIGUSR1


class Preempted(Exception):  # noqa: N818 - as in scripts
    """What the script's handler raises, to save and end."""


class Interrupted:
    """A backend whose first compilation is interrupted by a signal, and the script's handler."""

    def __init__(self) -> None:
        self.compiled = 0
        self.came = 0
        self.raises = True

    def compile(self, graph: Any, _: Any) -> Any:
        self.compiled += 1
        if self.compiled == 1:
            signal.raise_signal(SIGNAL)
        return graph.forward

    def handle(self, *_: Any) -> None:
        self.came += 1
        if self.raises:
            raise Preempted


@pytest.fixture
def interrupted() -> Iterator[Interrupted]:
    found = Interrupted()
    before = signal.signal(SIGNAL, found.handle)
    yield found
    signal.signal(SIGNAL, before)


def test_what_a_handler_raises_reaches_the_script(interrupted: Interrupted) -> None:
    with backend(interrupted.compile), rig(compile="default") as runtime:
        model = network()
        with pytest.raises(Preempted) as raised:
            model(X)
        assert signal.getsignal(SIGNAL) == interrupted.handle
        assert raised.value.__cause__ is None
        model(X).sum().backward()  # compiled by now
        outcome = runtime.outcomes()["compile"]
    assert interrupted.compiled > 1
    assert outcome.state is State.APPLIED


def test_a_handler_that_raises_nothing_is_called_once(interrupted: Interrupted) -> None:
    interrupted.raises = False
    with backend(interrupted.compile), rig(compile="default") as runtime:
        network()(X)
        assert runtime.outcomes()["compile"].state is State.APPLIED
    assert interrupted.came == 1
    assert signal.getsignal(SIGNAL) == interrupted.handle


def test_a_handler_may_be_replaced_by_itself(interrupted: Interrupted) -> None:
    """As by one that leaves the next signal of its kind to the system."""
    original = interrupted.handle

    def handle(*_: Any) -> None:
        signal.signal(SIGNAL, signal.SIG_IGN)
        original()

    signal.signal(SIGNAL, handle)
    with backend(interrupted.compile), rig(compile="default"), pytest.raises(Preempted):
        network()(X)
    assert signal.getsignal(SIGNAL) is signal.SIG_IGN


@pytest.mark.parametrize("number", [SIGNAL, signal.SIGTERM])
def test_what_a_handler_raises_while_dynamo_is_set_up(
    interrupted: Interrupted, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Dynamo is imported then, which takes seconds."""

    def prepare(lever: CompileLever, root: Root) -> bool:
        signal.raise_signal(number)
        return bool(original(lever, root))

    original: Any = CompileLever._prepare
    monkeypatch.setattr(CompileLever, "_prepare", prepare)
    before = signal.signal(number, interrupted.handle)
    try:
        with backend("eager"), rig(compile="default") as runtime:
            with pytest.raises(Preempted):
                network()(X)
            assert runtime.outcomes()["compile"].state is not State.FAILED
    finally:
        signal.signal(number, before)
