"""Where generators and iterators are, and what arrays hold, which their attributes don't tell."""

from __future__ import annotations

import array
import io
import random
from types import GeneratorType
from typing import Any

import torch

_DEPTH = 4  # of iterators over iterators
_SMALL = 1 << 16  # items of an array that is looked at
_BYTES = (bytearray, array.array)
_IN_MEMORY = (io.StringIO, io.BytesIO)
_ITERATORS = ("itertools", "builtins")


def generator_state(holder: Any) -> bytes:
    """Return the state of a generator of random numbers; empty for anything else."""
    if isinstance(holder, torch.Generator):
        return bytes(holder.get_state().tolist())
    if isinstance(holder, random.Random) and not isinstance(holder, random.SystemRandom):
        return repr(holder.getstate()).encode()
    if type(holder).__module__.startswith("numpy.random."):
        return _numpy_state(holder)
    return b""


def put_generator_state(holder: Any, state: bytes) -> None:
    """Set a generator of Python's or torch's back; NumPy's are left, which shows."""
    if isinstance(holder, torch.Generator):
        holder.set_state(torch.tensor(list(state), dtype=torch.uint8))


def _numpy_state(holder: Any) -> bytes:
    bits = getattr(holder, "bit_generator", None) or getattr(holder, "_bit_generator", holder)
    return repr([_flat(value) for value in _values(bits.state)]).encode()


def _values(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in _values(value)]
    return [state]


def _flat(value: Any) -> Any:
    return value.tobytes() if hasattr(value, "tobytes") else value


def hidden_state(holder: Any) -> list[Any]:
    """Return what changes when an object of Python's own does; nothing for other kinds."""
    kind = type(holder)
    if kind in _BYTES:
        return [bytes(holder) if len(holder) <= _SMALL else 0]
    if kind in _IN_MEMORY:
        return [holder.tell()]
    return _parts(holder, _DEPTH) if _is_iterator(kind) else []


def _is_iterator(kind: type) -> bool:
    # What a generator holds are its variables, which a search finds by itself.
    pythons = kind.__module__ in _ITERATORS and hasattr(kind, "__next__")
    return pythons and kind is not GeneratorType


def _parts(value: Any, depth: int) -> list[Any]:
    kind = type(value)
    if kind is int:
        return [value]
    if isinstance(value, tuple):
        return [part for item in value for part in _parts(item, depth)]
    if depth and _is_iterator(kind):
        return [kind.__name__, *_parts(value.__reduce__(), depth - 1)]
    return [len(value)] if isinstance(value, list) else []
