"""Calls that may hang or fail, kept from taking their caller along."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def within(limit_s: float, call: Callable[[], T]) -> T:
    """Give the call's answer, or what it raises; for calls into C that can't be interrupted.

    A call that hangs is left behind in a thread that doesn't keep this process alive; an executor
    of the standard library would wait for it at exit.

    Raises:
        TimeoutError: It gave no answer in `limit_s`.
    """
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - handed on to the caller
            answer.set_exception(error)

    Thread(target=work, name="fasttrain-patience", daemon=True).start()
    wait([answer], limit_s)
    if not answer.done():
        raise TimeoutError(f"no answer in {limit_s:g} s")
    return answer.result()


def attempt(what: str, call: Callable[[], T], fallback: T, notes: list[str]) -> T:
    """Give the call's answer; where it fails, `fallback`, and one more sentence in `notes`."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - the rest is wanted on a broken machine too
        notes.append(f"{what} can't be looked at: {type(error).__name__}: {error}")
        return fallback
