"""Detects side effects that don't show in tensors: printing, drawing, reading numbers in Python."""

from __future__ import annotations

import random
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from typing import Any

import torch
from torch import Tensor

from fasttrain.shim.data_parallel.random_streams import alike
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.seams import Hooking, Reading
from fasttrain.shim.process.callsite import called_by_user

READS = "it reads numbers of its tensors in Python, and may branch on them for all rows"


class SideEffectWatch:
    """Context that notices side effects of a call which don't show in tensors.

    Attributes:
        seen: The last one in words; empty if there was none.
    """

    def __init__(self) -> None:
        self.seen = ""
        self._undo = ExitStack()

    def __enter__(self) -> None:
        patching.wrap(Tensor, "register_hook", self._hooking, self._undo, Hooking.TRIAL)
        for name in ("tolist", "numpy"):
            patching.wrap(Tensor, name, self._reading, self._undo, Reading.TRIAL)
        _redirect(_Listening(sys.stdout, self), _Listening(sys.stderr, self), self._undo)

    def _hooking(self, original: Any) -> Any:
        def register_hook(tensor: Tensor, hook: Any) -> Any:
            if called_by_user(through=()):
                self.seen = "it registers hooks on gradients"
            return original(tensor, hook)

        return register_hook

    def _reading(self, original: Any) -> Any:
        def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.seen = READS
            return original(tensor, *args, **kwargs)

        return method

    def __exit__(self, *_: object) -> None:
        self._undo.close()


class _Listening:
    """Wraps a stream, and notes that it is written to."""

    def __init__(self, stream: Any, watch: SideEffectWatch) -> None:
        self._stream, self._watch = stream, watch

    def write(self, text: str) -> Any:
        self._watch.seen = "it prints"
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Silence:
    """Context that drops what is printed."""

    def __enter__(self) -> None:
        self._stream, self._undo = sys.stdout, ExitStack()
        _redirect(self, self, self._undo)

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def write(self, text: str) -> int:
        """Drop the text."""
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _redirect(out: Any, err: Any, undo: ExitStack) -> None:
    undo.enter_context(redirect_stdout(out))
    undo.enter_context(redirect_stderr(err))


def other_random_states() -> list[tuple[Any, Any]]:
    """Return the states of Python's and NumPy's generators, each with its setter."""
    states: list[tuple[Any, Any]] = [(random.setstate, random.getstate())]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        states.append((numpy.set_state, numpy.get_state()))
    return states


def all_random_states() -> list[tuple[Any, Any]]:
    """Return the states of all generators, including torch's, each with its setter."""
    generators: list[Any] = [torch.default_generator]
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        generators += cuda.default_generators
    states = [(generator.set_state, generator.get_state()) for generator in generators]
    return [*states, *other_random_states()]


def same_states(one: list[tuple[Any, Any]], other: list[tuple[Any, Any]]) -> bool:
    """True if nothing was drawn between two captures."""
    if len(one) != len(other):
        return True  # NumPy was imported in between
    return all(alike(a, b) for (_, a), (_, b) in zip(one, other, strict=True))
