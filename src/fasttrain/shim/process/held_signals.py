"""Delays the script's signal handlers while fasttrain's code runs, which handles exceptions."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM)  # not held: they end the run
_BENEATH: Any = sys.modules["_signal"]  # where `signal` asks, without its 2 us for each
_HELD = tuple(int(number) for number in signal.valid_signals() - set(_ENDING))


@contextmanager
def held_signals() -> Iterator[None]:
    """Delay signal handlers until after the block, since a handler's exception isn't the block's.

    torch raises from a handler if a DataLoader worker has died, and so do timeouts. A trial of a
    call would take such an exception for the call's own, on one rank only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers only run in the main thread
        return
    came: list[int] = []
    handlers: dict[int, Callable[..., Any]] = {}
    try:
        for signum in _HELD:
            handler = _BENEATH.getsignal(signum)
            if callable(handler):
                handlers[signum] = handler
                signal.signal(signum, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came:
            handlers[number](number, sys._getframe())
