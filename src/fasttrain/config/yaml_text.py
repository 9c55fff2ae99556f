"""YAML text to nodes: strict, bounded, and with the line of every problem."""

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

NO_ANCHORS = "anchors (&) and aliases (*) are not allowed; quote a text that starts so"

_MAX_DEPTH = 8
_MAX_NODES = 20_000
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses what makes YAML dangerous or boundless.

    Anchors and aliases let a small file stand for gigabytes, deep nesting exhausts the stack, and
    PyYAML's parser needs seconds for 100,000 values.
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
    """Return why the node that an event starts is refused; empty when it isn't."""
    if getattr(event, "anchor", None) is not None:
        return NO_ANCHORS
    if getattr(event, "tag", None) is not None:
        return "tags (!) are not allowed; quote a text that starts so"
    if depth == _MAX_DEPTH:
        return f"it is nested more than {_MAX_DEPTH} deep"
    if nodes == _MAX_NODES:
        return f"it has more than {_MAX_NODES} values"
    text = getattr(event, "value", "")
    if "\0" in text or _SURROGATE.search(text):
        return "a NUL or half a character can't be handed to a process"
    return ""


def compose(data: bytes, name: str) -> yaml.Node | None:
    """Return the root node of a YAML document; None when it is empty.

    Args:
        data: The file's bytes.
        name: What errors call the file.

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
        # PyYAML 6.0 hands the digits of "\UFFFFFFFF" to chr() unchecked.
        raise syntax_error(name, loader.line + 1, str(error)) from error
    finally:
        loader.dispose()


_QUOTE = "mend that line; a text with special characters goes into quotes"


def syntax_error(name: str, line: int, why: str, fix: str = _QUOTE) -> FasttrainError:
    """Return the error for text that isn't acceptable YAML."""
    return FasttrainError(
        f"{name}:{line}: can't be read as YAML",
        why=why,
        fix=fix,
        slug="config-syntax",
    )


# Reads a file that may be a pipe, as a shell's ``<(command)`` is one.


NOBODY_WRITES = "nobody writes to this pipe"

WRITER_S = 1.0  # for whoever writes to a named pipe to open it; a shell's own is open already
LOOK_S = 0.01


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Return the beginning of a file, of at most so many bytes.

    Raises:
        OSError: It can't be read, or is a pipe to which nobody writes.
    """
    with open(path, "rb", buffering=0, opener=without_waiting) as file:
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            return _written_to(file.fileno(), most_bytes, path)
        data = b""
        while (left := most_bytes - len(data)) and (piece := file.read(left)):
            data += piece
        return data


def _written_to(pipe: int, most_bytes: int, path: Path) -> bytes:
    """Give what is written to a pipe, as long as there is somebody who writes.

    Source: pipe(7): a read that must not wait gives nothing where nobody has the pipe open for
    writing, and EAGAIN where somebody has, and hasn't written yet.
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
            time.sleep(LOOK_S)
    return data
