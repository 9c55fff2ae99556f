"""Reads names as faulthandler writes them: in ASCII, with everything else escaped."""

from __future__ import annotations

import os
import re

# Source: CPython 3.11, Python/traceback.c, _Py_DumpASCII: the shortest form, in lower case. A
# backslash of the name itself is not escaped.
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_LAST = 0x10FFFF  # of Unicode


def name(text: str) -> str:
    """Return a name with its escapes decoded; characters that can't be printed stay escaped."""
    return _ESCAPE.sub(_letter, text)


def path(text: str) -> str:
    """Return a path, decoded unless a file exists whose name only looks escaped."""
    return text if os.path.exists(text) else name(text)  # noqa: PTH110 - False for any text


def _letter(match: re.Match[str]) -> str:
    escape = match[0]
    number = int(match[match.lastindex or 0], 16)
    if number > _LAST or escape != _shortest(number):
        return escape
    letter = chr(number)
    return letter if letter.isprintable() and not letter.isascii() else escape


def _shortest(number: int) -> str:
    if number <= 0xFF:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number <= 0xFFFF else f"\\U{number:08x}"
