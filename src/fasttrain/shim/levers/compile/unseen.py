"""Keeps the script from seeing a forked copy of its process, which it hasn't made.

Functions that the script has registered by ``os.register_at_fork`` don't run at such a fork, and a
script that waits for any child gets none of ours: the copy is ended before. So it is before the
script's exit handlers run, and before another program takes the place of the script.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from fasttrain.shim.hooks import patching
from fasttrain.shim.process import refusal

WAITS = "the script waits for any of its child processes"
HANDLES = "the script handles SIGCHLD"
REPLACED = "the script puts another program in its place"
ENDED = "the script has ended"
# Source: torch 2.13.0, torch/utils/data/_utils/signal_handling.py, _set_SIGCHLD_handler. The
# handler asks for the workers of DataLoaders alone, and calls the one that was there before.
_OF_LOADERS = "torch.utils.data._utils.signal_handling"
_OF_FASTTRAIN = "fasttrain."  # holds signals during a trial of a call, and puts each handler back


def _always(*_: Any, **__: Any) -> bool:
    return True


# What waits for any child, and with which arguments, by the names that Python has for them.
_ANY: dict[str, Callable[..., bool]] = {
    "wait": _always,
    "wait3": _always,
    "waitpid": lambda pid, *_: pid in (-1, 0),
    "wait4": lambda pid, *_, **__: pid in (-1, 0),
    "waitid": lambda idtype, *_: idtype != os.P_PID,
}
_FORKING = threading.local()


@contextmanager
def unseen_fork() -> Iterator[None]:
    """Have forks of this thread call no function that the script has registered for forks."""
    _FORKING.unseen = True
    try:
        yield
    finally:
        _FORKING.unseen = False


@contextmanager
def unseen_deprecations() -> Iterator[None]:
    """Show no DeprecationWarning in the block.

    Not by `catch_warnings`, after which Python forgets which warnings of the script it has shown.
    """
    ignored = ("ignore", None, DeprecationWarning, None, 0)
    with ExitStack() as undo:
        patching.wrap(warnings, "filters", lambda filters: [ignored, *filters], undo)
        yield


class Unseen:
    """Hears when the script could see a copy.

    Args:
        end: Called with a reason for which a copy has to end at once, if there is one.
    """

    def __init__(self, end: Callable[[str], None]) -> None:
        self._end = end
        self._why = ""

    def install(self, undo: ExitStack) -> None:
        """Watch what registers functions for forks, and what could see or leave a child."""
        patching.wrap(os, "register_at_fork", _not_for_copies, undo)
        for name, waits in _ANY.items():
            if hasattr(os, name):
                patching.wrap(os, name, functools.partial(self._before, waits, WAITS), undo)
        for name in ("execv", "execve"):  # which the other functions call
            replaced = functools.partial(self._before, _always, REPLACED)
            patching.wrap(os, name, replaced, undo)
        patching.wrap(signal, "signal", functools.partial(self._before, _handles, HANDLES), undo)
        ends: list[list[Callable[..., None]]] = [refusal.at_clean_end, refusal.at_failure]
        for at_end in ends:
            at_end.append(self._script_ends)
            undo.callback(at_end.remove, self._script_ends)

    def why_not(self) -> str:
        """Return why no copy can be made; empty if one can."""
        handled = _handles(signal.SIGCHLD, signal.getsignal(signal.SIGCHLD))
        if handled or signal.SIGCHLD in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
            return HANDLES
        return self._why

    def _script_ends(self, *_: BaseException) -> None:
        self._give_up(ENDED)

    def _give_up(self, why: str) -> None:
        self._why = why
        self._end(why)

    def _before(
        self, concerns: Callable[..., bool], why: str, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            concerned = False
            with suppress(Exception):  # Python's function raises its own for such arguments
                concerned = concerns(*args, **kwargs)
            if concerned:
                self._give_up(why)
            return original(*args, **kwargs)

        return call


def _handles(signalnum: Any, handler: Any) -> bool:
    """True if a handler of a signal, which isn't in place yet or is, hears of a copy's end."""
    if signalnum != signal.SIGCHLD:
        return False
    if _is_of_others(handler):
        handler = signal.getsignal(signalnum)
    # None is one that isn't Python's.
    return (handler is None or callable(handler)) and not _is_of_others(handler)


def _is_of_others(handler: Any) -> bool:
    """True if a handler isn't the script's, and leaves the end of a copy alone."""
    module = str(getattr(handler, "__module__", ""))
    return module == _OF_LOADERS or module.startswith(_OF_FASTTRAIN)


def _not_for_copies(register: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(register)
    def call(*args: Any, **functions: Any) -> None:
        register(*args, **{name: _skipping(one) for name, one in functions.items()})

    return call


def _skipping(function: Any) -> Any:
    if not callable(function):
        return function

    @functools.wraps(function)
    def call() -> None:
        if not getattr(_FORKING, "unseen", False):
            function()

    return call
