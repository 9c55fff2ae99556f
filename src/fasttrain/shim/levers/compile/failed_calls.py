"""Repeats eagerly a call that has failed in a compiled graph.

Dynamo traces a ``try`` block as if nothing in it could fail, and calls the graph behind it: an
error of an operation, such as that of a decomposition which doesn't converge, ends the call where
the script has an ``except`` of its own. Generated code also raises RuntimeError where torch's own
kernels raise IndexError. The repeated call goes the script's way, or raises what the script alone
would raise, at its own line.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from itertools import takewhile
from types import FrameType
from typing import Any

from torch.nn import Module

from fasttrain.shim.hooks.call_state import (
    Backup,
    is_alone,
    is_generated,
    is_ordinary,
    without_place,
)
from fasttrain.shim.hooks.roots import first_parameter
from fasttrain.shim.process.callsite import own_prefixes

Call = Callable[..., Any]

_RUN_GRAPHS = (
    "torch._functorch.aot_autograd", "torch._functorch._aot_autograd", "torch._inductor",
)  # fmt: skip
_LOADERS = "torch.utils.data"  # whose handler of SIGCHLD raises where the main thread is


class Repeating:
    """Makes the compiled calls of a module, and repeats eagerly those that fail in a graph.

    Args:
        module: The module.
        report: Called with why a call has failed, before it is repeated.
    """

    def __init__(self, module: Module, report: Callable[[str], None]) -> None:
        self._backup, self._report = Backup(module), report
        # Looked up once, since it takes 2 us: a compiled module hardly moves.
        parameter = first_parameter(module)
        self._device = None if parameter is None else parameter.device
        # False once a call has changed an input or a large buffer, which aren't saved. In a call
        # that fails this can't be seen: graphs count versions of what they change at their end.
        self._saves_all = True

    def call(
        self, compiled: Call, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what a call returns."""
        if not is_alone():  # other ranks would wait for the collectives of a repetition
            return compiled(module, *args, **kwargs)
        backup = self._backup
        backup.take(args, kwargs, self._device)
        try:
            try:
                output = compiled(module, *args, **kwargs)
                self._saves_all = self._saves_all and backup.holds_all()
                return output
            except Exception as error:
                if not (self._saves_all and backup.holds_all() and _failed_in_graph(error)):
                    raise
                why = without_place(error)  # a graph's is that of none of its lines
            backup.put_back()
        finally:
            backup.release()
        # Not in the except block: an error of the repetition is the script's own and must not be
        # chained to this one.
        self._report(why)
        return module._call_impl(*args, **kwargs)


def _failed_in_graph(error: Exception) -> bool:
    """True if a graph raised an error, and not the script between graphs or a signal handler."""
    if not is_ordinary(error):
        return False
    prefixes = own_prefixes()
    frames = reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)])
    inner = takewhile(lambda f: _is_torchs(f, prefixes), frames)
    names = [str(frame.f_globals.get("__name__")) for frame in inner]
    return any(name.startswith(_RUN_GRAPHS) for name in names) and not any(
        name.startswith(_LOADERS) for name in names
    )


def _is_torchs(frame: FrameType, prefixes: tuple[str, ...]) -> bool:
    return frame.f_code.co_filename.startswith(prefixes) or is_generated(frame)
