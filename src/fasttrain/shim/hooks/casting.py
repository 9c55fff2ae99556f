"""Casts tensors inside containers, such as a root's output, to fp32."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

Change = Callable[[Tensor], Tensor]


def to_float32(value: Any, dtype: torch.dtype, lift: Change = Tensor.float) -> Any:
    """Return a value with its tensors of ``dtype`` cast to fp32; other tensors stay as they are.

    Args:
        value: A tensor, a container as of `map_tensors`, or anything else.
        dtype: The precision to cast from.
        lift: Casts one tensor of that precision to fp32.
    """
    return map_tensors(value, lambda tensor: lift(tensor) if tensor.dtype is dtype else tensor)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors inside containers in a fixed order, each as often as it occurs."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def map_tensors(value: Any, change: Change) -> Any:
    """Return a value with ``change`` applied to each tensor in it.

    Containers are tuples, lists, deques, mappings, dataclasses, namespaces and distributions. A
    container in which no tensor changes is returned itself; otherwise it is a new one of its type.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return _map_tuple(value, change)
    if isinstance(value, list | deque):
        return _map_list(value, change)
    if isinstance(value, Mapping):
        return _map_mapping(value, change)
    if holds_by_attributes(value):
        return _map_attributes(value, change)
    return value


def holds_by_attributes(value: Any) -> bool:
    """True for a container whose items are its attributes, such as a dataclass."""
    return isinstance(value, Distribution | SimpleNamespace) or (
        is_dataclass(value) and not isinstance(value, type)
    )


def _same(old: Iterable[Any], new: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(old, new, strict=True))


def _map_tuple(value: tuple[Any, ...], change: Change) -> Any:
    items = [map_tensors(item, change) for item in value]
    if _same(value, items):
        return value
    kind: Any = type(value)
    if kind is tuple:
        return tuple(items)
    if hasattr(kind, "n_sequence_fields"):  # torch.return_types: max, sort, ...
        return kind(items)
    # Named tuples too. tuple's __new__, because one of their own may take other arguments.
    result = tuple.__new__(kind, items)
    vars(result).update(vars(value)) if hasattr(value, "__dict__") else None
    return result


def _map_list(value: list[Any] | deque[Any], change: Change) -> Any:
    items = [map_tensors(item, change) for item in value]
    if _same(value, items):
        return value
    if type(value) is list:
        return items
    result = copy.copy(value)
    result.clear()
    result.extend(items)
    return result


def _map_mapping(value: Mapping[Any, Any], change: Change) -> Any:
    """Change a mapping's values, by assignment: so HF's ModelOutput updates its attributes too."""
    items = {key: map_tensors(item, change) for key, item in value.items()}
    if _same(value.values(), items.values()):
        return value
    if type(value) is dict:
        return items
    if not isinstance(value, MutableMapping):
        return value  # a read-only one: what its constructor takes is unknown
    result: Any = copy.copy(value)
    for key, item in items.items():
        result[key] = item
    return result


def _map_attributes(value: Any, change: Change) -> Any:
    old = attributes_of(value)
    new = {name: map_tensors(item, change) for name, item in old.items()}
    if _same(old.values(), new.values()):
        return value
    result = copy.copy(value)
    for name, item in new.items():
        object.__setattr__(result, name, item)  # frozen dataclasses too
    return result


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of such a container by name."""
    if hasattr(value, "__dict__"):
        return dict(vars(value))
    names = [name for name in value.__dataclass_fields__ if hasattr(value, name)]  # slots
    return {name: getattr(value, name) for name in names}
