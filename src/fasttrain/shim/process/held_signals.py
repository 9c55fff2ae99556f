"""Keeps exceptions of the script's signal handlers apart from those of the interrupted code."""

from __future__ import annotations

import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM)  # not held: they end the run
_BENEATH: Any = sys.modules["_signal"]  # where `signal` asks, without its 2 us for each
_HELD = tuple(int(number) for number in signal.valid_signals() - set(_ENDING))


@contextmanager
def held_signals(*also: int) -> Iterator[None]:
    """Delay signal handlers until after the block, since a handler's exception isn't the block's.

    torch raises from a handler if a DataLoader worker has died, and so do timeouts. A trial of a
    call would take such an exception for the call's own, on one rank only.

    Args:
        also: Which are delayed, too, of SIGINT and SIGTERM, which otherwise end the run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers only run in the main thread
        return
    came: list[int] = []
    handlers: dict[int, Callable[..., Any]] = {}
    try:
        for signum in (*_HELD, *also):
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


class _Carried(BaseException):
    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class HandlerErrors:
    """Brings exceptions of signal handlers through code that would take them for its own.

    A handler that gives up a run, such as one of a time limit, raises wherever the main thread is.
    Between `begin` and `end` this is code that catches each ``Exception``.
    """

    def __init__(self) -> None:
        self._inside = 0
        self._replaced: dict[int, tuple[Any, Any]] = {}

    def through(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Make a call that raises what a handler has raised inside of it."""
        if threading.current_thread() is not threading.main_thread():
            return call(*args, **kwargs)  # handlers only run in the main thread
        self._inside += 1
        try:
            return call(*args, **kwargs)
        except _Carried as carried:
            error = carried.error
        finally:
            self._inside -= 1
        raise error

    def begin(self) -> None:
        """Replace the handlers, if this is inside of a call of `through`."""
        main = threading.current_thread() is threading.main_thread()
        if not main or not self._inside or self._replaced:
            return
        for signum in signal.valid_signals():
            handler = _BENEATH.getsignal(signum)
            if callable(handler):
                carrying = functools.partial(_carry, handler)
                self._replaced[signum] = handler, carrying
                _BENEATH.signal(signum, carrying)

    def end(self) -> None:
        """Put the handlers back, except those that the script has replaced meanwhile."""
        if threading.current_thread() is threading.main_thread():
            for signum, (handler, carrying) in self._replaced.items():
                if _BENEATH.getsignal(signum) is carrying:
                    _BENEATH.signal(signum, handler)
            self._replaced = {}


def _carry(handler: Callable[..., Any], signum: int, frame: FrameType | None) -> None:
    try:
        handler(signum, frame)
    except Exception as error:  # noqa: BLE001 - raised by `through`
        raise _Carried(error) from None
