"""Has rank 0 alone read standard input, and hands its bytes to the other ranks.

All ranks inherit one pipe or terminal, and each byte of it goes to whoever reads it first.
"""

from __future__ import annotations

import builtins
import io
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

from fasttrain.shim.data_parallel.answers.answers import Answers, itself
from fasttrain.shim.data_parallel.answers.files import Files
from fasttrain.shim.data_parallel.answers.places import asking, outside_of_torch
from fasttrain.shim.hooks import patching


class StandardInput:
    """Replaces ``input`` and ``sys.stdin``.

    Args:
        answers: Rank 0's answers.
        files: Tells the script's calls from those of libraries.
    """

    def __init__(self, answers: Answers, files: Files) -> None:
        self._answers = answers
        self._files = files

    def install(self, undo: ExitStack) -> None:
        """Replace them; what is no file of Python's own stays."""
        self._files.replace(builtins, "input", self._input, undo)
        stdin: Any = sys.stdin
        if type(stdin) is not io.TextIOWrapper or type(stdin.buffer) is not io.BufferedReader:
            return
        buffer = io.BufferedReader(_SharedInput(stdin.buffer, self._answers))
        shared: Any = io.TextIOWrapper(buffer, stdin.encoding, stdin.errors, newline="\n")
        shared.mode = "r"
        patching.put(sys, "stdin", shared, undo)

    def _input(
        self, frame: FrameType | None, original: Callable[..., str], prompt: object = ""
    ) -> str:
        place = self._files.place_of(frame, "read a line of input")
        if not place or not _is_terminal(sys.stdin):  # `sys.stdin` asks rank 0 itself
            return original(prompt)
        return str(self._answers.do(place, lambda: original(prompt), itself))


class _SharedInput(io.RawIOBase):
    """What lies under ``sys.stdin``: all ranks read the same blocks at the same places."""

    def __init__(self, stdin: io.BufferedReader, answers: Answers) -> None:
        super().__init__()
        self.name = stdin.name
        self._stdin = stdin
        self._answers = answers

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stdin.fileno()

    def isatty(self) -> bool:
        return self._stdin.isatty()

    def readinto(self, target: Any) -> int:
        frame = asking(outside_of_torch(sys._getframe(1)), for_libraries=True)
        if frame is None or not self._answers.answers():
            block = self._stdin.read1(len(target))
        else:
            place = self._answers.places.number(frame, "read standard input")
            block = self._answers.ask(place, lambda: self._read(len(target))).encode("latin-1")
        target[: len(block)] = block
        return len(block)

    def _read(self, most: int) -> str:
        return self._stdin.read1(most).decode("latin-1")  # answers are text


def _is_terminal(stream: Any) -> bool:
    return bool(stream is not None and not stream.closed and stream.isatty())
