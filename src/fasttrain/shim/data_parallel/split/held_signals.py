"""Has signals wait until a block has ended whose errors are taken for those of what runs in it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM)  # these are not errors, and must not wait


@contextmanager
def held_signals() -> Iterator[None]:
    """Call what handles a signal after the block, since what it raises is no error of the block.

    torch raises from such a handler that a worker of a DataLoader has died, and timeouts raise so
    as well; a trial of a call would take it for an error of the call, on one rank alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # where no handler runs
        return
    came: list[int] = []
    handlers: dict[int, Callable[..., Any]] = {}
    try:
        for signum in signal.valid_signals() - set(_ENDING):
            handler = signal.getsignal(signum)
            if callable(handler):
                handlers[signum] = handler
                signal.signal(signum, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came:
            handlers[number](number, sys._getframe())
