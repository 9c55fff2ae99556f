"""Announces each compilation while it goes on: a large model takes minutes, without a word."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack


def announce(begins: Callable[[], None], ends: Callable[[], None], undo: ExitStack) -> None:
    """Call one function when dynamo begins to compile, and the other when it has compiled.

    Compilations within others count as one. No-op where torch has no such callbacks.
    Source: torch 2.13, torch/_dynamo/callback.py
    """
    try:
        from torch._dynamo.callback import callback_handler as handler
    except ImportError:  # before torch 2.3
        return

    def begun(*_: object) -> None:
        begins()

    def ended(*_: object) -> None:
        ends()

    # A reset of dynamo's, torch.compiler.reset() say, clears them: nothing is announced from then.
    handler.register_start_callback(begun)
    handler.register_end_callback(ended)
    undo.callback(_remove, handler.start_callbacks, begun)
    undo.callback(_remove, handler.end_callbacks, ended)


def _remove(callbacks: list[Callable[..., None]], callback: Callable[..., None]) -> None:
    if callback in callbacks:
        callbacks.remove(callback)
