"""Stops a worker with an error of fasttrain's, told once and in its three lines."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, NoReturn

from fasttrain.model.errors import FasttrainError

# How this process ends: what is to be done when the script has ended, and that it ends.
#
# A script may swallow the `SystemExit` that is to end it, by a bare ``except:`` around
# ``next(it)``. Where a snapshot decides on what comes next, it must not go on, and is ended from
# outside of it.


at_clean_end: list[Callable[[], None]] = []
at_failure: list[Callable[[BaseException], None]] = []


def ended_well() -> None:
    """Do what is to be done at a good end."""
    for act in at_clean_end:
        act()


def failed(error: BaseException) -> None:
    """Do what is to be done with the exception that ends the script, before it is printed."""
    for act in at_failure:
        act(error)


def ended_by_us(error: FasttrainError) -> None:
    """Have it recorded that fasttrain ends this process, where no exception can get through."""
    told = SystemExit(int(error.exit_code))
    told.__cause__ = error  # as `refuse` raises it
    failed(told)


class Leaving:
    """The end of this process that has begun, if one has."""

    def __init__(self) -> None:
        self._end: SystemExit | None = None
        self._insists = False

    def insist(self, undo: ExitStack) -> None:
        """Have a process that was to end do so the next time that it `may_go_on`."""
        self._end, self._insists = None, True
        undo.callback(self._stop_insisting)
        at_clean_end.append(self._no_clean_end)
        undo.callback(at_clean_end.remove, self._no_clean_end)

    def begin(self, end: SystemExit) -> None:
        """Note the exception that is to end this process, and is about to be raised."""
        self._end = end

    def may_go_on(self, *_: Any) -> None:
        """End the process here where it should have ended before."""
        if self._end is not None and self._insists:
            leave_at_once(self._end)

    def _stop_insisting(self) -> None:
        self._insists = False

    def _no_clean_end(self) -> None:
        if self._end is not None and self._end.code:
            self.may_go_on()


LEAVING = Leaving()  # of this process


def leave_at_once(end: SystemExit) -> NoReturn:
    """End this process as the interpreter would at this exception, but whoever catches it."""
    for act in at_failure if end.code else ():
        act(end)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a pipe without a reader, a stream that is closed
            stream.flush()
    os._exit(end.code if isinstance(end.code, int) else 0)


def refuse(error: FasttrainError) -> NoReturn:
    """Print the error and leave with its exit code."""
    LEAVING.may_go_on()  # or a script that goes on behind a refusal would be refused again
    print(error, file=sys.stderr, flush=True)  # noqa: T201 - a worker has no other way to say it
    end = SystemExit(int(error.exit_code))
    LEAVING.begin(end)
    raise end from error  # the card of the run tells it, too


def refuse_anywhere(error: FasttrainError) -> NoReturn:
    """Do so where an exception ends but a thread of the script's, and not the process."""
    try:
        refuse(error)
    except SystemExit as end:
        leave_at_once(end)
