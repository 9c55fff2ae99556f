"""Has rank 0 alone run the script's commands and read its input; the other ranks get the result.

A command creates folders, copies checkpoints, appends to files: it must run once. A process that
runs concurrently with the script, as by `subprocess.Popen`, is started by each rank.
"""

from __future__ import annotations

import builtins
import functools
import os
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

from fasttrain.shim.data_parallel.answers.answers import Answers, itself
from fasttrain.shim.data_parallel.answers.files import Files

_RUNNING = ("run", "call", "check_call", "check_output", "getoutput", "getstatusoutput")
_DONE, _FAILED, _LATE = range(3)


class Commands:
    """Replaces the functions that run a command to its end.

    Args:
        answers: Rank 0's answers.
        files: Tells the script's calls from those of libraries.
    """

    def __init__(self, answers: Answers, files: Files) -> None:
        self._answers = answers
        self._files = files

    def install(self, undo: ExitStack) -> None:
        """Replace the functions."""
        for name in _RUNNING:
            self._files.replace(subprocess, name, functools.partial(self._run, name), undo)
        self._files.replace(os, "system", functools.partial(self._run, "system"), undo)
        self._files.replace(builtins, "input", self._input, undo)

    def _input(
        self, frame: FrameType | None, original: Callable[..., str], prompt: object = ""
    ) -> str:
        place = self._files.place_of(frame, "read a line of input")
        if not place:
            return original(prompt)
        return str(self._answers.do(place, lambda: original(prompt), itself))

    def _run(
        self,
        name: str,
        frame: FrameType | None,
        original: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        place = self._files.place_of(frame, f"run a command by {name}")
        if not place:
            return original(*args, **kwargs)
        here: list[Any] = []

        def run() -> list[Any]:
            try:
                here.append(original(*args, **kwargs))
            except subprocess.CalledProcessError as error:
                here.append(error)
                return [_FAILED, error.returncode, error.output, error.stderr]
            except subprocess.TimeoutExpired as error:
                here.append(error)
                return [_LATE, error.timeout, error.output, error.stderr]
            return [_DONE, *_parts(here[0])]

        how, *parts = self._answers.do(place, run, itself)
        if here:  # on rank 0
            if how == _DONE:
                return here[0]
            raise here[0]
        self._files.forget_copies()
        return _outcome(how, parts, args[0] if args else kwargs.get("args"))


def _parts(result: Any) -> list[Any]:
    if isinstance(result, subprocess.CompletedProcess):
        return [True, result.returncode, result.stdout, result.stderr]
    if isinstance(result, tuple):
        return [False, *result]
    return [False, result]


def _outcome(how: int, parts: list[Any], command: Any) -> Any:
    """Return rank 0's result, or raise rank 0's error."""
    if how == _FAILED:
        raise subprocess.CalledProcessError(parts[0], command, *parts[1:])
    if how == _LATE:
        raise subprocess.TimeoutExpired(command, *parts)
    completed, *values = parts
    if completed:
        return subprocess.CompletedProcess(command, *values)
    return tuple(values) if len(values) > 1 else values[0]
