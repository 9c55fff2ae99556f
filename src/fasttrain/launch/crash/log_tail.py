"""The end of a rank's log, tracebacks in it, and the Python stack that a fatal signal left."""

from __future__ import annotations

import linecache
import os
import re
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from fasttrain.files import open_regular
from fasttrain.launch.hang import stacks
from fasttrain.launch.run_dir.lock import of_last_attempt
from fasttrain.model.crash import MESSAGE_LENGTH, Frame, Raised
from fasttrain.model.places import WORKER_FOLDER

TAIL_BYTES = 65536
LAST_LINES = 60  # a C++ stack follows the error itself
LINE_LENGTH = 300
HEAD = "Traceback (most recent call last):"

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b.")
_SHIM = f"/{WORKER_FOLDER}"
_CALL = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d{1,9}),? in (?P<function>.+)')
# The last line of a traceback: a dotted name, a colon and the message.
_ERROR = re.compile(r"(?P<kind>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$", re.DOTALL)
# Source: CPython 3.11, Lib/traceback.py, between chained tracebacks.
_CHAINED = re.compile(
    r"(During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):\s*$"
)

# Lines that continue a message, or that an ending interpreter prints; not the script's output.
# Source: torch 2.13, c10/cuda/CUDAException.cpp and c10/util/Exception.cpp
_GOES_ON = re.compile(
    r"\s|$|CUDA kernel errors |For debugging consider |Compile with |Exception raised from "
    r"|frame #\d+: |fasttrain: |.*Warning: "
)


def tail(log: Path) -> str:
    """Return the end of what the last attempt wrote, as a screen shows it; empty without a log."""
    try:
        with open_regular(log) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read()
    except OSError:  # a rank that never wrote has none
        return ""
    # A progress bar redraws its line after \r; only the last state was seen.
    lines = (
        line.removesuffix("\r").rpartition("\r")[2]
        for line in data.decode(errors="replace").split("\n")
    )
    return of_last_attempt("\n".join(_printable(_ESCAPES.sub("", line)) for line in lines))


def last_lines(text: str, count: int) -> tuple[str, ...]:
    """Return the last lines of a text, blank ones left out."""
    lines = [line[:LINE_LENGTH] for line in text.splitlines() if line.strip()]
    return tuple(lines[-count:])


def before_traceback(text: str) -> str:
    """Return the text before the last traceback and those that it is chained to."""
    before, _, _ = text.rpartition(HEAD)
    while _CHAINED.search(before):
        before, _, _ = before.rpartition(HEAD)
    return before


def recent_traceback(text: str) -> Raised | None:
    """Return the last exception whose traceback begins in the last lines of a text, or None."""
    raised = read_traceback("\n".join(text.splitlines()[-LAST_LINES:]))
    return raised and replace(raised, message=_divide(raised.message)[0])


def last_traceback(text: str) -> Raised | None:
    """Return the exception whose traceback a text ends with, or None.

    An exception that is followed by more output was handled: the script continued.
    """
    raised = read_traceback(text)
    return None if raised is None or _divide(raised.message)[1] else raised


def _divide(message: str) -> tuple[str, str]:
    """Split the text after a traceback into its message, and what was printed later."""
    first, *lines = message.split("\n")
    own = [first, *takewhile(_GOES_ON.match, lines)]
    return "\n".join(own).rstrip(), "\n".join(lines[len(own) - 1 :])


def read_traceback(text: str) -> Raised | None:
    """Return the last exception of which a text holds the traceback, or None."""
    _, found, block = text.rpartition(HEAD)
    if not found:
        return None
    frames: list[Frame] = []
    lines = block.strip("\n").split("\n")
    for index, line in enumerate(lines):
        if call := _CALL.match(line):
            source = lines[index + 1].strip() if index + 1 < len(lines) else ""
            frames.append(Frame(call["file"], int(call["line"]), call["function"], source))
        elif frames and not line.startswith(" "):
            if not (error := _ERROR.match("\n".join(lines[index:]).strip())):
                return None
            message = (error["message"] or "")[:MESSAGE_LENGTH]
            return Raised((error["kind"],), message, tuple(frames))
    return None


def read_stack(path: Path) -> tuple[Frame, ...]:
    """Return the Python stack of the thread that a fatal signal ended, innermost frame last.

    If that thread ran no Python, as threads of autograd and NCCL don't, it is the stack of the
    first thread that was in the user's code.
    """
    try:
        with open_regular(path) as file:
            text = file.read().decode(errors="replace")
    except OSError:  # it ended without writing one
        return ()
    threads = [
        tuple(
            _frame(call)
            for call in map(_CALL.match, reversed(block.splitlines()))
            if call and _SHIM not in call["file"]
        )
        for block in re.split(r"^(?:Current t|T)hread .*$", text, flags=re.MULTILINE)[1:]
    ]
    current = threads[:1] if threads and threads[0] else []
    own = [frames for frames in threads if any(frame.own for frame in frames)]
    return next(iter([*current, *own]), ())


def _frame(call: re.Match[str]) -> Frame:
    file, line = stacks.path(call["file"]), int(call["line"])
    return Frame(file, line, stacks.name(call["function"]), _source(file, line))


def _source(file: str, line: int) -> str:
    if not os.path.isfile(file):  # noqa: PTH113 - False for names that no file can have
        return ""
    return linecache.getline(file, line).strip()


def _printable(line: str) -> str:
    return "".join(c for c in line if c.isprintable() or c == "\t")
