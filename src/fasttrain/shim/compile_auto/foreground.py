"""Bounds a compilation that the training waits for, where no copy of the process can compile.

A process that uses a device can't be forked. There the model is compiled at its next call, and the
compilation is ended by an exception if it takes too long: dynamo runs eagerly what a backend can't
compile.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.device_clock import module_of
from fasttrain.shim.levers.compile.account import TOO_LONG
from fasttrain.shim.levers.compile.unseen import unseen_deprecations

# Compiled steps mostly take no more memory than plain ones. What a device has to have for them, as
# a multiple of what plain steps took at most: an assumption.
ROOM = 1.25
# Dynamo's call of the compiler: it takes any exception in there for "can't be compiled".
# Source: torch 2.13, ``torch/_dynamo/output_graph.py``
COMPILER_CALL = ("torch._dynamo.output_graph", "_call_user_compiler")
# An operator that is traced, one that is lowered, and a kernel that another process compiles. No
# other graphs that are walked: an error in the code of a kernel is printed.
# Source: torch 2.13
ASKING = (
    ("torch.fx.experimental.symbolic_shapes", "PropagateUnbackedSymInts", "run_node"),
    ("torch._inductor.graph", "GraphLowering", "run_node"),
    ("torch._inductor.codecache", "LambdaFuture", "result"),
)


class TooLongError(Exception):
    """Ends a compilation."""


class TimeBox:
    """Ends compilations that take longer than they may in all.

    The compiler is asked at each operator that it traces or lowers, and at each kernel that it
    waits for, and the exception is one of these calls'. So it is raised where an error of the
    compiler's own could be, and in no import, destructor or step of the script's. What lies between
    two of these calls is done to its end: dynamo's reading of the forward pass, the writing of all
    kernels of a graph, and each kernel.

    Args:
        allowed_s: What they may take together.

    Attributes:
        allowed_s: The same.
        over: Whether a compilation was ended.
    """

    def __init__(self, allowed_s: float) -> None:
        self.allowed_s, self.over = allowed_s, False
        self._left_s = allowed_s
        self._began_s = math.inf  # of the compilation that runs

    def install(self, listeners: list[Callable[[str], None]], undo: ExitStack) -> None:
        """Hear of compilations, and have the compiler ask, which is imported for that."""
        with unseen_deprecations():  # of what torch itself uses, where it is imported
            owners = [importlib.import_module(module) for module, *_ in ASKING]
        # The first: ranks that wait for another's compilation do so in a listener.
        listeners.insert(0, self.compiling)
        undo.callback(listeners.remove, self.compiling)
        for module, (_, kind, method) in zip(owners, ASKING, strict=True):
            if hasattr(module, kind):
                patching.wrap(getattr(module, kind), method, self._asking, undo)

    def compiling(self, name: str) -> None:
        """Note that a compilation begins, of the root of that name, or ends, without a name."""
        now_s = time.monotonic()
        if self._began_s < now_s:
            self._left_s -= now_s - self._began_s
        self._began_s = now_s if name else math.inf

    def check(self) -> None:
        """Do nothing in time, and where an exception would be the script's.

        Raises:
            TooLongError: The compilation has taken too long.
        """
        if time.monotonic() - self._began_s > self._left_s and _compiles(sys._getframe(1)):
            self.over = True
            raise TooLongError(TOO_LONG)

    def _asking(self, function: Any) -> Any:
        @functools.wraps(function)
        def asking(*args: Any, **kwargs: Any) -> Any:
            self.check()
            return function(*args, **kwargs)

        return asking


def _compiles(frame: FrameType | None) -> bool:
    """Return whether dynamo has called the compiler that this frame is in."""
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == COMPILER_CALL:
            return True
        frame = frame.f_back
    return False


def no_room_on(devices: Iterable[torch.device]) -> str:
    """Return why a device may have too little memory for compiled steps; empty if it has enough."""
    for device in devices:
        module: Any = module_of(device)
        if module is None:
            continue
        try:
            free, _ = module.mem_get_info(device)
            ours = module.memory_reserved(device)
            most = module.max_memory_allocated(device)
        except (AttributeError, RuntimeError):
            return f"it isn't known how much memory of {device} is free"
        if free + ours < ROOM * most:
            return (
                f"no memory to run compiled: plain steps take {most / 2**30:.1f} GiB of {device},"
                f" and {(free + ours) / 2**30:.1f} GiB are there"
            )
    return ""
