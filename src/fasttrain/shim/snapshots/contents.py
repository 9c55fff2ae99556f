"""What is in a tensor: put there, and told apart from what was there before."""

from __future__ import annotations

import ctypes
import hashlib
from collections import deque
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

_LOOKED_AT_BYTES = 1 << 30  # a second's work; of what is larger, that many elements are looked at:
_LOOKED_AT = 1 << 20


def are_alike(tensor: Tensor, other: Tensor) -> bool:
    """Whether one can be filled with the other's content."""
    return (tensor.shape, tensor.dtype) == (other.shape, other.dtype)


def fill(tensor: Tensor, value: Tensor) -> None:
    """Put a value of the same shape into a tensor, whatever it hangs on or was made by."""
    with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        own = tensor.detach()
        _unexpanded(own).copy_(value[tuple(slice(n) for n in _unexpanded(own).shape)])


def _unexpanded(tensor: Tensor) -> Tensor:
    """Give it without the repetitions that `expand` made, which share their memory."""
    if tensor.layout is torch.strided:
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.size(dim) > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


def stamp(tensor: Tensor) -> tuple[int, bytes]:
    """Give what changes when the content does: torch's count of changes, and a hash.

    ``tensor.data`` and NumPy change a tensor without being counted, and what inference_mode made
    has no count.
    """
    return -1 if tensor.is_inference() else tensor._version, _hash(tensor.detach())


def is_stamped(tensor: Tensor, before: tuple[int, bytes]) -> bool:
    """Whether the content is what it was when a stamp was given."""
    if not tensor.is_inference() and tensor._version != before[0]:
        return False
    return _hash(tensor.detach()) == before[1]


def _hash(tensor: Tensor) -> bytes:
    readable = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta
    if not readable or not tensor.numel():
        return b""
    flat = _unexpanded(tensor).reshape(-1)
    if flat.nbytes > _LOOKED_AT_BYTES:
        flat = flat[:: max(1, flat.numel() // _LOOKED_AT)]
    flat = flat.cpu().contiguous()
    # torch's tensors are no buffers, and NumPy may be missing.
    content = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
    return hashlib.sha256(content).digest()


def merged(there: Any, then: Any) -> Any:
    """Give what was, in the objects that are there now where they can take it in.

    What else holds one of them, such as an optimizer a tensor, goes on to hold the same.
    """
    if isinstance(there, Tensor) and isinstance(then, Tensor) and are_alike(there, then):
        fill(there, then)
        return there
    if isinstance(there, dict) and isinstance(then, dict):
        items = {key: merged(there.get(key), value) for key, value in then.items()}
        there.clear()
        there.update(items)
        return there
    if type(there) is type(then) and isinstance(there, list | deque):
        both = zip_longest(list(there)[: len(then)], then)
        items_in_order = [merged(one, other) for one, other in both]
        there.clear()
        there.extend(items_in_order)
        return there
    if type(there) is type(then) is tuple and len(there) == len(then):
        return tuple(map(merged, there, then))
    return then
