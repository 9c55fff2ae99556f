"""The numbers that the script reads from tensors: recorded, and given again when it is replayed.

A replayed loop computes nothing, but what steers it, what it counts and what it prints follows
from numbers such as ``loss.item()``. Only the script's own reads count, and those of GradScaler,
which decide on its steps; not what is read inside of a model's call, of a DataLoader, of a
backward pass or of an optimizer's step, all of which a replay leaves out. Where the script has
hooks on gradients, a replay makes its backward passes, and what is read in them counts.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.seams import Reading
from fasttrain.shim.process.callsite import own_prefixes
from fasttrain.shim.snapshots.errors import refuse_diverged
from fasttrain.shim.snapshots.gradient_hooks import GradientHooks

READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__format__")
ARRAYS = ("numpy", "__array__")
_KINDS = (*READS, *ARRAYS)
KEPT_BYTES = 4096  # of an array, such as a mean, or the hits of a batch: a page of memory
_SCALER = os.path.join("torch", "amp", "grad_scaler.py")  # noqa: PTH118


class Reads:
    """What has been read so far, in order.

    Args:
        apart: Whether what runs now is left out by a replay.
        hooks: Whether it makes backward passes all the same.
    """

    def __init__(self, apart: Callable[[], bool], hooks: GradientHooks) -> None:
        self._apart = apart
        self._hooks = hooks
        self._own = own_prefixes()
        self._thread = threading.get_ident()
        self._counts: dict[CodeType, bool] = {}
        self.kinds = bytearray()
        self.values: list[Any] = []
        self._replayed: tuple[bytes, list[Any]] | None = None

    def install(self, undo: ExitStack) -> None:
        """Follow the ways by which a tensor becomes a number of Python's."""
        for kind, name in enumerate(READS):
            make = functools.partial(self._following, kind)
            patching.wrap(Tensor, name, make, undo, Reading.SNAPSHOTS)
        for kind, name in enumerate(ARRAYS, len(READS)):
            make = functools.partial(self._following_arrays, kind)
            patching.wrap(Tensor, name, make, undo, Reading.SNAPSHOTS)

    def _following(self, kind: int, original: Callable[..., Any]) -> Callable[..., Any]:
        counts, apart, thread = self._counts, self._apart, self._thread
        task: Any = torch._C._current_graph_task_id
        hooks = self._hooks

        @functools.wraps(original)
        def read(tensor: Any, *args: Any) -> Any:
            frame = sys._getframe(1)
            known = counts.get(frame.f_code)
            if known is None:
                known = self._is_the_scripts(frame)
            if not known or apart() or (task() != -1 and not hooks.there):
                return original(tensor, *args)
            if threading.get_ident() != thread:
                return original(tensor, *args)
            again = self._replayed is not None
            value = self._again(kind) if again else original(tensor, *args)
            self.kinds.append(kind)
            # The script may go on to change a list.
            self.values.append(copy.deepcopy(value) if type(value) is list else value)
            return value

        return read

    def _following_arrays(self, kind: int, original: Callable[..., Any]) -> Callable[..., Any]:
        task: Any = torch._C._current_graph_task_id
        hooks = self._hooks

        @functools.wraps(original)
        def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            array = original(tensor, *args, **kwargs)
            frame = sys._getframe(1)
            known = self._counts.get(frame.f_code)
            if known is None:
                known = self._is_the_scripts(frame)
            if not known or self._apart() or (task() != -1 and not hooks.there):
                return array
            if threading.get_ident() != self._thread:
                return array
            if self._replayed is not None:
                self._fill(array, self._again(kind))
            self.kinds.append(kind)
            self.values.append(_told(array))
            return array

        return read

    def _fill(self, array: Any, then: Any) -> None:
        """Put into an array, which is the tensor's own memory, what it had then."""
        if then is None:  # too large to be kept
            return
        told = _told(array)
        if told is None or told[:2] != then[:2]:
            refuse_diverged(f"it reads an array of {array.shape} where it read one of {then[1]}")
        if told != then:  # what can't be written to holds what was never computed
            content = bytearray(then[2].encode("latin-1"))
            array[...] = sys.modules["numpy"].frombuffer(content, then[0]).reshape(then[1])

    def _is_the_scripts(self, frame: FrameType) -> bool:
        if frame.f_code.co_filename.endswith(_SCALER):  # for whoever called it
            return frame.f_back is not None and self._is_the_scripts(frame.f_back)
        own = frame.f_code.co_filename.startswith(self._own)
        self._counts[frame.f_code] = not own
        return not own

    def state(self) -> dict[str, Any]:
        """Return what was read."""
        return {"kinds": bytes(self.kinds), "values": self.values}

    def replay(self, state: dict[str, Any]) -> None:
        """Return what `state` gave from now on, instead of what the tensors hold."""
        self._replayed = (state["kinds"], state["values"])

    def _again(self, kind: int) -> Any:
        kinds, values = self._replayed or (b"", [])
        at = len(self.values)
        if at >= len(values) or kinds[at] != kind:
            refuse_diverged(f"it reads a number (Tensor.{_KINDS[kind]}) that it did not read then")
        return copy.deepcopy(values[at])

    def arrive(self) -> None:
        """Read from the tensors themselves again."""
        _, values = self._replayed or (b"", [])
        if len(self.values) != len(values):
            refuse_diverged(f"it has read {len(self.values)} numbers, and then {len(values)}")
        self._replayed = None


def _told(array: Any) -> tuple[str, tuple[int, ...], str] | None:
    """Return an array's type, shape and content in plain types; None for a large one."""
    if array.nbytes > KEPT_BYTES:
        return None
    return array.dtype.str, array.shape, array.tobytes().decode("latin-1")
