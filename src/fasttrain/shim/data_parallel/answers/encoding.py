"""Encodes rank 0's answers as JSON: plain values, paths, results of stat, and errors."""

from __future__ import annotations

import builtins
import json
import os
import sys
from pathlib import Path
from typing import Any

_STATS = {"stat": os.stat_result, "statvfs": os.statvfs_result}
_TOP = (str, int, float, type(None))


class NotPlainError(Exception):
    """Raised if rank 0's answer can't be encoded: each rank has to find its own."""


def encoded(value: Any) -> bytes:
    """Return a value as JSON, for `decoded`."""
    try:
        return json.dumps(_plain(value)).encode()
    except NotPlainError:
        return b'{"own": true}'


def encoded_error(error: Exception) -> bytes:
    """Return an exception as JSON, for `decoded` to raise."""
    kind = type(error)
    args = [arg if isinstance(arg, _TOP) else str(arg) for arg in error.args]
    names = [_name(getattr(error, name, None)) for name in ("filename", "filename2")]
    return json.dumps({"error": [kind.__module__, kind.__qualname__, args, *names]}).encode()


def decoded(text: bytes) -> Any:
    """Return rank 0's answer.

    Raises:
        NotPlainError: If rank 0 could not encode it.
        Exception: The error that rank 0 got instead of an answer.
    """
    return _value(json.loads(text))


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return {"bytes": os.fsdecode(value)}
    if isinstance(value, os.PathLike):
        return {"path": os.fsdecode(value)}
    for name, kind in _STATS.items():
        if type(value) is kind:
            content: Any = value.__reduce__()[1]
            return {name: [list(content[0]), content[1]]}
    raise NotPlainError


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "bytes":
        return os.fsencode(content)
    if kind == "path":
        return Path(content)
    if kind in _STATS:
        make: Any = _STATS[kind]
        return make(tuple(content[0]), content[1])
    if kind == "error":
        raise _error(*content)
    raise NotPlainError


def _error(module: str, name: str, args: list[Any], *paths: str | None) -> Exception:
    """Return an exception like rank 0's; a RuntimeError if its class can't be created."""
    kind: Any = sys.modules.get(module, builtins)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    try:
        if not issubclass(kind, Exception):
            raise TypeError
        if issubclass(kind, OSError) and len(args) == 2:
            first, second = paths
            return OSError(*args, first, None, second) if first else OSError(*args)
        return kind(*args)  # type: ignore[no-any-return]
    except Exception:  # noqa: BLE001 - classes of any kind
        return RuntimeError(": ".join([name, *map(str, args)]))


def _name(path: Any) -> str | None:
    try:
        return None if path is None else os.fsdecode(path)
    except TypeError:
        return str(path)
