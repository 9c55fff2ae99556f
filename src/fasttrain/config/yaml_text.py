"""Read and parse YAML text: strictly, with limits, and with the line of every error."""

from __future__ import annotations

import errno
import os
import re
import select
import stat
import time
from pathlib import Path

import yaml
from yaml.error import MarkedYAMLError
from yaml.reader import ReaderError

from fasttrain.model.errors import FasttrainError
from fasttrain.model.reading import without_waiting

NO_ANCHORS = "anchors (&) and aliases (*) are not allowed; quote a text that starts with one"

_MAX_DEPTH = 8
_MAX_NODES = 20_000
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses dangerous and unbounded YAML.

    Anchors and aliases let a small file expand to gigabytes, deep nesting exhausts the stack, and
    PyYAML's parser takes seconds for 100,000 values.
    """

    depth = 0
    nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if problem := _problem(event, self.depth, self.nodes):
            raise MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self.depth += 1
        self.nodes += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _problem(event: yaml.Event, depth: int, nodes: int) -> str:
    """Return why the node that starts at this event is refused; empty if it is allowed."""
    if getattr(event, "anchor", None) is not None:
        return NO_ANCHORS
    if getattr(event, "tag", None) is not None:
        return "tags (!) are not allowed; quote a text that starts with one"
    if depth == _MAX_DEPTH:
        return f"it is nested more than {_MAX_DEPTH} deep"
    if nodes == _MAX_NODES:
        return f"it has more than {_MAX_NODES} values"
    text = getattr(event, "value", "")
    if "\0" in text or _SURROGATE.search(text):
        return "a NUL or half a character can't be passed to a process"
    return ""


def compose(data: bytes, name: str) -> yaml.Node | None:
    """Return the root node of a YAML document; None if it is empty.

    Args:
        data: The file's bytes.
        name: The file's name in errors.

    Raises:
        FasttrainError: ``config-syntax``, with the line.
    """
    try:
        text = data.decode("utf-8")
        loader = _Loader(text)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise syntax_error(name, line, "it is not UTF-8 text") from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise syntax_error(name, line, "it has control characters") from error
    try:
        return loader.get_single_node()
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else loader.line + 1
        raise syntax_error(name, line, error.problem or "it is not YAML") from error
    except (ValueError, OverflowError) as error:
        # PyYAML 6.0 passes the digits of "\UFFFFFFFF" to chr() unchecked.
        raise syntax_error(name, loader.line + 1, str(error)) from error
    finally:
        loader.dispose()


_QUOTE = "correct that line; put a text with special characters into quotes"


def syntax_error(name: str, line: int, why: str, fix: str = _QUOTE) -> FasttrainError:
    """Return the error for text that is not valid YAML, or not allowed."""
    return FasttrainError(
        f"{name}:{line}: can't be read as YAML",
        why=why,
        fix=fix,
        slug="config-syntax",
    )


# The file may be a pipe: ``--config <(command)`` is one. A shell's pipe has its writer already; a
# named pipe may wait for one this long.
WRITER_S = 1.0
POLL_S = 0.01
NOBODY_WRITES = "nobody writes to this pipe"


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Return the first bytes of a file or a pipe, at most `most_bytes`.

    Raises:
        OSError: If it can't be read, or is a pipe without a writer.
    """
    with open(path, "rb", buffering=0, opener=without_waiting) as file:
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            return _written_to(file.fileno(), most_bytes, path)
        data = b""
        while (left := most_bytes - len(data)) and (piece := file.read(left)):
            data += piece
        return data


def _written_to(pipe: int, most_bytes: int, path: Path) -> bytes:
    """Return what is written to a pipe, until its last writer closes it.

    Source: pipe(7): a non-blocking read returns nothing if the pipe has no writer, and fails with
    EAGAIN if it has one that hasn't written yet.
    """
    data, deadline_s = b"", time.monotonic() + WRITER_S
    while len(data) < most_bytes:
        try:
            piece = os.read(pipe, most_bytes - len(data))
        except BlockingIOError:
            select.select([pipe], [], [])
            continue
        data += piece
        if data and not piece:
            break
        if time.monotonic() > deadline_s and not data:
            raise OSError(errno.EPIPE, NOBODY_WRITES, str(path))
        if not piece:
            time.sleep(POLL_S)
    return data
