"""Bounds a compilation that the training waits for, where no copy of the process can compile.

A process that uses a device can't be forked. There the model is compiled at its next call, and the
compilation is ended by an exception if it takes too long: dynamo runs eagerly what it can't
compile.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.device_clock import module_of

LEAST_S = 0.1  # for each, so that it is ended inside of what catches its errors
AGAIN_S = 1.0  # after which a compilation that has caught the exception gets another one
# Compiled steps mostly take no more memory than plain ones. What a device has to have for them, as
# a multiple of what plain steps took at most: an assumption.
ROOM = 1.25


class TooLongError(Exception):
    """Ends a compilation."""


class TimeBox:
    """Ends compilations that take longer than they may in all.

    The exception is raised in the thread that compiles, between two of Python's instructions. It
    leaves nothing but a compilation: one that is still to be raised when that has ended is raised,
    and caught, before `compiling` returns. Where Python can raise nothing, as in a weak reference's
    callback, it is lost, and the next one ends the compilation.

    Args:
        allowed_s: What they may take together.

    Attributes:
        allowed_s: The same.
        over: Whether a compilation was ended.
    """

    def __init__(self, allowed_s: float) -> None:
        self.allowed_s, self.over = allowed_s, False
        self._left_s = allowed_s
        self._lock = threading.Lock()
        self._done: threading.Event | None = None  # of the compilation that runs
        self._began_s = 0.0

    def install(self, listeners: list[Callable[[str], None]], undo: ExitStack) -> None:
        """Hear of compilations; print nothing of exceptions that are lost."""
        # The first: what the others do when a compilation has ended isn't to be ended.
        listeners.insert(0, self.compiling)
        undo.callback(self.compiling, "")  # should its end not have been told
        undo.callback(listeners.remove, self.compiling)
        patching.wrap(sys, "unraisablehook", _but_ours, undo)

    def compiling(self, name: str) -> None:
        """Note that a compilation begins, of the root of that name, or ends, without a name."""
        if name:
            self._begin()
            return
        while True:
            try:
                self._end()
                break
            except TooLongError:
                continue

    def _begin(self) -> None:
        if self._done is not None:
            return
        self._done, self._began_s = threading.Event(), time.monotonic()
        given = self._done, threading.get_ident(), max(self._left_s, LEAST_S)
        threading.Thread(target=self._watch, args=given, daemon=True).start()

    def _end(self) -> None:
        with self._lock:
            if self._done is None:
                return
            self._done.set()
            self._left_s -= time.monotonic() - self._began_s
            self._done = None

    def _watch(self, done: threading.Event, thread: int, wait_s: float) -> None:
        while not done.wait(wait_s):
            with self._lock:
                if done.is_set():
                    return
                self.over = True
                _raise_in(thread, TooLongError)
            wait_s = AGAIN_S


def _but_ours(print_error: Any) -> Any:
    @functools.wraps(print_error)
    def hook(unraisable: Any) -> None:
        if unraisable.exc_type is not TooLongError:
            print_error(unraisable)

    return hook


def _raise_in(thread: int, error: type[BaseException]) -> None:
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    raise_in(ctypes.c_ulong(thread), ctypes.py_object(error))


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
