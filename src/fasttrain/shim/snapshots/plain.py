"""A snapshot's contents in types that can be read without running anything of theirs.

What is pickled names classes and functions that are called when it is loaded. A snapshot holds
tensors, numbers, words and containers of them alone, so that `torch.load` can be kept to those.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_KIND, _OF = "fasttrain: kind", "of"  # keys of a dictionary that stands for something else
_AS_THEY_ARE = frozenset({type(None), bool, int, float, str})
_KINDS = (Counter, OrderedDict, set, frozenset, torch.Size)
_MAKE: dict[str, Callable[[Any], Any]] = {
    **{kind.__name__: kind for kind in _KINDS},
    "deque": lambda told: deque(*told),
    "Counter": lambda pairs: Counter(dict(pairs)),  # which would count them
}


class UnplainError(Exception):
    """Something can't be kept without pickling it.

    Attributes:
        where: Where it is, such as ``schedulers.0.state.model``.
        kind: Its type.
    """

    def __init__(self, where: str, kind: type) -> None:
        super().__init__(f"{where} is a {kind.__module__}.{kind.__qualname__}")
        self.where, self.kind = where, kind


def packed(value: Any, where: str = "") -> Any:
    """Give a value in plain types.

    Raises:
        UnplainError: It can't be told in them.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if isinstance(value, Tensor):
        return _tensor(value, where)
    if kind is dict:
        return {_key(key, where): packed(item, f"{where}.{key}") for key, item in value.items()}
    if kind in (list, tuple):
        if _AS_THEY_ARE.issuperset(map(type, value)):  # numbers that were read, a million of them
            return value
        return kind(packed(item, f"{where}.{index}") for index, item in enumerate(value))
    return _told(value, kind, where)


def unpacked(value: Any) -> Any:
    """Give what `packed` was given."""
    if type(value) in (list, tuple):
        if _AS_THEY_ARE.issuperset(map(type, value)):
            return value
        return type(value)(map(unpacked, value))
    if type(value) is not dict:
        return value
    if _KIND not in value:
        return {key: unpacked(item) for key, item in value.items()}
    name, of = value[_KIND], unpacked(value[_OF])
    if name == "device":
        return torch.device(of)
    if name == "numpy":
        return _numpy_again(*of)
    return bytes(of.tolist()) if name == "bytes" else _MAKE[name](of)


def _key(key: Any, where: str) -> Any:
    if type(key) not in _AS_THEY_ARE or key == _KIND:
        raise UnplainError(f"a key of {where}", type(key))
    return key


def _tensor(tensor: Tensor, where: str) -> Tensor:
    own = tensor.detach()
    if type(own) is not Tensor:
        raise UnplainError(where, type(own))
    # A slice would be written with all that it is cut from.
    whole = own.layout is not torch.strided or _storage_bytes(own) <= own.nelement() * own.itemsize
    return own if whole else own.clone()


def _storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _told(value: Any, kind: type, where: str) -> dict[str, Any]:
    """Give a dictionary that stands for what torch doesn't read as it is."""
    numpy = sys.modules.get("numpy")
    if kind in _KINDS:
        pairs = isinstance(value, dict)
        return {_KIND: kind.__name__, _OF: packed(list(value.items() if pairs else value), where)}
    if kind is deque:
        return {_KIND: "deque", _OF: packed((list(value), value.maxlen), where)}
    if kind is torch.device:
        return {_KIND: "device", _OF: str(value)}
    if kind is bytes:
        return {_KIND: "bytes", _OF: _bytes(value)}
    if numpy and isinstance(value, numpy.generic | numpy.ndarray) and not value.dtype.hasobject:
        shape = value.shape if isinstance(value, numpy.ndarray) else None
        return {_KIND: "numpy", _OF: (value.dtype.str, shape, _bytes(value.tobytes()))}
    raise UnplainError(where, kind)


def _bytes(value: bytes) -> Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0)


def _numpy_again(dtype: str, shape: tuple[int, ...] | None, of: Tensor) -> Any:
    numpy = importlib.import_module("numpy")  # torch has imported it, where it is there
    flat = numpy.frombuffer(of.numpy().tobytes(), dtype=dtype)
    return flat[0] if shape is None else flat.reshape(shape).copy()
