"""Gives a root's floating outputs back in fp32, in the containers they came in."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def to_float32(value: Any, dtype: torch.dtype) -> Any:
    """Cast tensors of ``dtype`` to fp32 inside tuples, lists, mappings and dataclasses.

    Integer, complex and other floating tensors are left alone. A container in which nothing had
    to change is given back as it is, anything else as a new one of the same type.
    """
    if isinstance(value, Tensor):
        return value.float() if value.dtype is dtype else value
    if isinstance(value, tuple):
        return _cast_tuple(value, dtype)
    if isinstance(value, list):
        items = [to_float32(item, dtype) for item in value]
        return value if _same(value, items) else _refill(value, items)
    if isinstance(value, Mapping):
        return _cast_mapping(value, dtype)
    if is_dataclass(value) and not isinstance(value, type):
        return _cast_dataclass(value, dtype)
    return value


def _same(old: Any, new: Any) -> bool:
    return all(a is b for a, b in zip(old, new, strict=True))


def _cast_tuple(value: tuple[Any, ...], dtype: torch.dtype) -> Any:
    items = [to_float32(item, dtype) for item in value]
    if _same(value, items):
        return value
    if hasattr(value, "_make"):
        return value._make(items)
    kind = type(value)
    # torch.return_types (max, sort, ...) and plain subclasses take one sequence.
    return tuple(items) if kind is tuple else kind(items)


def _refill(value: list[Any], items: list[Any]) -> list[Any]:
    if type(value) is list:
        return items
    result = copy.copy(value)
    result[:] = items
    return result


def _cast_mapping(value: Mapping[Any, Any], dtype: torch.dtype) -> Any:
    """Cast a mapping's values; HF's ModelOutput keeps items and attributes alike by assignment."""
    items = {key: to_float32(item, dtype) for key, item in value.items()}
    if _same(value.values(), items.values()):
        return value
    if type(value) is dict:
        return items
    result: Any = copy.copy(value)
    for key, item in items.items():
        result[key] = item
    return result


def _cast_dataclass(value: Any, dtype: torch.dtype) -> Any:
    changed = {}
    for field in fields(value):
        old = getattr(value, field.name, None)
        new = to_float32(old, dtype)
        if new is not old:
            changed[field.name] = new
    if not changed:
        return value
    result = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(result, name, item)  # frozen dataclasses too
    return result
