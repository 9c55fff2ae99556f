"""Calls with a time limit: vendors' and system tools, and functions that may hang."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from threading import Thread
from typing import TypeVar

TICK_S = 0.05
KILL_S = 1.0  # SIGKILL has no effect while a process waits inside a driver


class ToolError(RuntimeError):
    """A tool is missing, fails, or doesn't answer in time.

    Attributes:
        said: Its stderr; if that is empty, its stdout.
    """

    def __init__(self, text: str, said: str = "") -> None:
        super().__init__(text)
        self.said = said


def run_tool(argv: Sequence[str], *, timeout_s: float, errors_too: bool = False) -> str:
    """Return a tool's standard output; processes that it leaves behind are killed.

    Args:
        argv: The tool and its arguments.
        timeout_s: Limit in seconds.
        errors_too: True to return stderr as well, in the order of printing.

    Raises:
        ToolError: If it can't start, ends with an error, or takes longer than `timeout_s`.
    """
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if errors_too else subprocess.PIPE,
            start_new_session=True,  # so that its children can be killed with it
        )
    except OSError as error:
        raise ToolError(f"{argv[0]} can't be started: {error.strerror}") from error
    try:
        code = _wait(process, timeout_s)
    finally:
        output, errors = _end(process)
    if code is None:
        raise ToolError(f"{argv[0]} gave no answer in {timeout_s:g} s")
    if code:
        said = first_line(errors) or first_line(output) or "no message"
        raise ToolError(f"{argv[0]} ended with {code}: {said}", errors or output)
    return output


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, and all processes of that session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def first_line(text: str) -> str:
    """Return the first line that is not blank; empty if there is none."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """Read a tool's output until it ends, and return its exit code; None if it hangs."""
    deadline_s = time.monotonic() + timeout_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        # In short ticks: processes that it left behind may hold the pipe long after its end.
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=min(left_s, TICK_S))
        if process.poll() is not None:
            break
    return process.poll()


def _end(process: subprocess.Popen[bytes]) -> tuple[str, str]:
    """Kill a tool with all that it has started, and return its stdout and stderr."""
    end_group(process)
    try:
        output, errors = process.communicate(timeout=KILL_S)
    except subprocess.TimeoutExpired as late:  # held by a process that has left its session
        output, errors = late.output or b"", late.stderr or b""
    for pipe in filter(None, (process.stdout, process.stderr)):
        pipe.close()
    return output.decode(errors="replace"), (errors or b"").decode(errors="replace")


# Calls that may hang or fail, without harm to the caller.


T = TypeVar("T")


def within(limit_s: float, call: Callable[[], T]) -> T:
    """Return the call's result, or raise its exception; for calls into C that may hang.

    Raises:
        TimeoutError: If there is no result within `limit_s`.
    """
    # Not an executor of the standard library, which waits at exit for a call that hangs.
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            answer.set_exception(error)

    Thread(target=work, name="fasttrain-patience", daemon=True).start()
    wait([answer], limit_s)
    if not answer.done():
        raise TimeoutError(f"no answer in {limit_s:g} s")
    return answer.result()


def attempt(what: str, call: Callable[[], T], fallback: T, notes: list[str]) -> T:
    """Return the call's result; if it fails, return `fallback` and add a sentence to `notes`."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - the rest is wanted on a broken machine too
        notes.append(f"{what} can't be examined: {type(error).__name__}: {error}")
        return fallback
