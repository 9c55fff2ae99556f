"""Ends a worker with an error of fasttrain's, and runs what has to happen at its end."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, NoReturn

from fasttrain.model.errors import FasttrainError

at_clean_end: list[Callable[[], None]] = []  # called when the script has ended without an error
at_failure: list[Callable[[BaseException], None]] = []  # called with the exception that ends it


def ended_well() -> None:
    """Run the functions of `at_clean_end`."""
    for act in at_clean_end:
        act()


def failed(error: BaseException) -> None:
    """Run the functions of `at_failure`, before the exception is printed."""
    for act in at_failure:
        act(error)


def ended_by_us(error: FasttrainError) -> None:
    """Record that fasttrain ends this process, at a place where no exception can be raised."""
    end = SystemExit(int(error.exit_code))
    end.__cause__ = error  # as `refuse` raises it
    failed(end)


class Leaving:
    """The end of this process, from the moment that `refuse` has begun it.

    A script may swallow the `SystemExit` that is to end it, by a bare ``except:`` around
    ``next(it)``. Where a snapshot decides what comes next, the script must not go on then: so
    `may_go_on` ends the process by `os._exit`.
    """

    def __init__(self) -> None:
        self._end: SystemExit | None = None
        self._insists = False

    def insist(self, undo: ExitStack) -> None:
        """From now on end a process that swallowed its end, at its next call of `may_go_on`."""
        self._end, self._insists = None, True
        undo.callback(self._stop_insisting)
        at_clean_end.append(self._no_clean_end)
        undo.callback(at_clean_end.remove, self._no_clean_end)

    def begin(self, end: SystemExit) -> None:
        """Note the exception that is about to be raised to end this process."""
        self._end = end

    def may_go_on(self, *_: Any) -> None:
        """End the process if it should have ended before, and did not."""
        if self._end is not None and self._insists:
            leave_at_once(self._end)

    def _stop_insisting(self) -> None:
        self._insists = False

    def _no_clean_end(self) -> None:
        if self._end is not None and self._end.code:
            self.may_go_on()


LEAVING = Leaving()  # of this process


def leave_at_once(end: SystemExit) -> NoReturn:
    """End this process as the interpreter would at this exception, but so that nobody catches it.

    Runs the atexit functions and flushes stdout and stderr first.
    """
    for act in at_failure if end.code else ():
        act(end)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a pipe without a reader, a stream that is closed
            stream.flush()
    os._exit(end.code if isinstance(end.code, int) else 0)


def refuse(error: FasttrainError) -> NoReturn:
    """Print the error and raise `SystemExit` with its exit code."""
    LEAVING.may_go_on()  # else a script that swallowed the first refusal would be refused again
    print(error, file=sys.stderr, flush=True)  # noqa: T201 - a worker has no other channel
    end = SystemExit(int(error.exit_code))
    LEAVING.begin(end)
    raise end from error  # the launcher reads the cause, for the card of the run


def refuse_anywhere(error: FasttrainError) -> NoReturn:
    """End the process with the error, also from a thread, which an exception alone would end."""
    try:
        refuse(error)
    except SystemExit as end:
        leave_at_once(end)
