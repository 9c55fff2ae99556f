"""A signal that comes inside of a trial is handled when it is over."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fasttrain.shim.process.held_signals import held_signals


class DiedError(RuntimeError):
    """What the handler raises, as that of torch does where a worker of a DataLoader has died."""


@pytest.fixture
def came() -> Iterator[list[int]]:
    """Handle SIGUSR1 by an error until the test has ended, and note that it came."""
    numbers: list[int] = []

    def handle(number: int, _: Any) -> None:
        numbers.append(number)
        raise DiedError

    before = signal.signal(signal.SIGUSR1, handle)
    yield numbers
    signal.signal(signal.SIGUSR1, before)


def test_what_a_handler_raises_comes_after_the_block(came: list[int]) -> None:
    inside = []
    with pytest.raises(DiedError), held_signals():  # noqa: PT012 - that it goes on is the point
        try:
            signal.raise_signal(signal.SIGUSR1)
            inside.append(list(came))
        except DiedError:
            inside.append("raised")
    assert (inside, came) == ([[]], [signal.SIGUSR1])
    with pytest.raises(DiedError):  # at once again
        signal.raise_signal(signal.SIGUSR1)


def test_blocks_may_stand_inside_of_each_other(came: list[int]) -> None:
    with pytest.raises(DiedError), held_signals():  # noqa: PT012 - as above
        with held_signals():
            signal.raise_signal(signal.SIGUSR1)
        assert came == []
    assert came == [signal.SIGUSR1]


def test_what_ends_a_process_does_not_wait() -> None:
    with pytest.raises(KeyboardInterrupt), held_signals():
        signal.raise_signal(signal.SIGINT)


def test_another_thread_touches_no_handler(came: list[int]) -> None:
    handler, seen = signal.getsignal(signal.SIGUSR1), []

    def run() -> None:
        with held_signals():
            seen.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [handler]
    assert came == []
