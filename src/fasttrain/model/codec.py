"""Dataclasses to JSON and back, checked against their annotations; standard library only."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_LARGEST = 2**63  # what is counted here is bytes, nanoseconds or steps: 64 bits hold it
_SHOWN_CHARACTERS = 60


class CodecError(ValueError):
    """Data that does not fit the dataclass that it is read into."""


def to_data(value: Any) -> Any:
    """Return a dataclass as JSON data: enums as their values, tuples as lists."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_data(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_data(item) for item in value]
    return value


def from_data(kind: type[T], data: Any) -> T:
    """Return a dataclass built from JSON data.

    Raises:
        CodecError: If a field is missing, unknown or of the wrong type; the message names its path.
    """
    result: T = _read(kind, data, "", {})
    return result


def dumps(value: Any, *, indent: int | None = 2) -> str:
    """Return a dataclass as JSON text."""
    return json.dumps(to_data(value), indent=indent)


def loads(kind: type[T], text: str | bytes) -> T:
    """Return a dataclass built from JSON text.

    Raises:
        CodecError: If the text is not JSON, or does not fit the dataclass.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"not JSON: {error}") from error
    return from_data(kind, data)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _read(kind: Any, data: Any, path: str, variables: Mapping[Any, Any]) -> Any:
    kind = variables.get(kind, kind)  # T of a generic dataclass such as Decision[T]
    origin = get_origin(kind)
    if is_dataclass(origin or kind):
        return _read_dataclass(kind, data, path)
    if kind is Any:
        return data
    if origin in (Union, types.UnionType):
        return _read_union(kind, data, path, variables)
    if origin is Literal:
        if data not in get_args(kind):
            raise CodecError(
                f"{path or 'value'} is {_shown(data)}, not one of {list(get_args(kind))}"
            )
        return data
    if origin in (tuple, dict):
        return _read_container(kind, data, path, variables)
    return _read_scalar(kind, data, path)


def _read_union(kind: Any, data: Any, path: str, variables: Mapping[Any, Any]) -> Any:
    problems = []
    for arm in get_args(kind):
        try:
            return _read(arm, data, path, variables)
        except CodecError as error:
            problems.append(str(error))
    raise CodecError(problems[0])


def _read_container(kind: Any, data: Any, path: str, variables: Mapping[Any, Any]) -> Any:
    args = get_args(kind)
    if get_origin(kind) is tuple:
        if not isinstance(data, list):
            raise CodecError(f"{path or 'value'} is not a list")
        return tuple(
            _read(args[0], item, f"{path}[{index}]", variables) for index, item in enumerate(data)
        )
    if not isinstance(data, dict):
        raise CodecError(f"{path or 'value'} is not a mapping")
    return {key: _read(args[1], item, f"{path}.{key}", variables) for key, item in data.items()}


def _read_scalar(kind: Any, data: Any, path: str) -> Any:
    if kind is type(None):
        expected: Any = type(None)
    elif kind in (int, float) and _is_number(data):
        return _read_number(kind, data, path)
    elif isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(data)
        except ValueError:
            raise CodecError(
                f"{path or 'value'} is {_shown(data)}, not a {kind.__name__}"
            ) from None
    else:
        expected = kind
    # bool is a subclass of int in Python, but not a number in JSON.
    if not isinstance(data, expected) or (isinstance(data, bool) and expected is not bool):
        raise CodecError(f"{path or 'value'} is {_shown(data)}, not {expected.__name__}")
    return data


def _is_number(data: Any) -> bool:
    return isinstance(data, int | float) and not isinstance(data, bool)


def _read_number(kind: type[int] | type[float], data: float, path: str) -> float:
    # Python's json reads NaN and Infinity, which no field of ours can mean.
    if isinstance(data, float) and (kind is int or not math.isfinite(data)):
        raise CodecError(f"{path or 'value'} is {data}, not {kind.__name__}")
    if not -_LARGEST <= data < _LARGEST and isinstance(data, int):
        raise CodecError(f"{path or 'value'} has more than 64 bits")
    return kind(data)


def _shown(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _read_dataclass(kind: Any, data: Any, path: str) -> Any:
    cls = get_origin(kind) or kind
    variables = dict(zip(getattr(cls, "__parameters__", ()), get_args(kind), strict=False))
    if not isinstance(data, dict):
        raise CodecError(f"{path or cls.__name__} is not a mapping")
    hints = _hints(cls)
    known = {f.name: f for f in fields(cls)}
    if unknown := sorted(map(str, set(data) - set(known))):
        raise CodecError(f"{_join(path, unknown[0])} is not a field of {cls.__name__}")
    values = {}
    for name, f in known.items():
        if name in data:
            values[name] = _read(hints[name], data[name], _join(path, name), variables)
            # Records of another version of fasttrain are refused, not guessed at.
            if name == "schema" and values[name] != f.default:
                what = f"{_join(path, name)} is {values[name]}"
                raise CodecError(f"{what}; this fasttrain reads version {f.default}")
        elif f.default is MISSING and f.default_factory is MISSING:
            raise CodecError(f"{_join(path, name)} is missing")
    try:
        return cls(**values)
    except ValueError as error:  # raised by the class's own __post_init__
        raise CodecError(f"{path or cls.__name__}: {error}") from error


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
