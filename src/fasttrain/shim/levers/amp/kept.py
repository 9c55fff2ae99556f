"""Casts to fp32 the low-precision tensors that a root's modules keep, which the script may read."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.weak import WeakTensorKeyDictionary

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.casting import map_tensors
from fasttrain.shim.hooks.dynamo_skip import pass_over
from fasttrain.shim.hooks.lifted import lift
from fasttrain.shim.hooks.seams import Reading
from fasttrain.shim.levers.amp.repeat import CONTAINERS, Backup

TORCHS = frozenset(vars(Module()))


class _Attributes:
    """The attributes of a module that are tensors, or None and may become one; 0.1 us for each."""

    def __init__(self, part: Module) -> None:
        self._part = weakref.ref(part)
        self._known = -1  # how many attributes there are of all kinds
        self._names: list[str] = []

    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        part = self._part()
        values = {} if part is None else vars(part)
        if len(values) != self._known:
            self._known = len(values)
            kinds = {name: type(value) for name, value in list(values.items())}
            self._names = [n for n, k in kinds.items() if k in (Tensor, NoneType)]
            self._names = [name for name in self._names if name not in TORCHS]
        for name in self._names:
            value = values.get(name)
            if type(value) is Tensor and (changed := change(value)) is not value:
                values[name] = changed


class KeptTensors:
    """The attributes and buffers in which the modules of one root keep tensors from a call.

    Args:
        backup: The root's state before a call.
        dtype: The low precision.
    """

    def __init__(self, backup: Backup, dtype: torch.dtype) -> None:
        self._backup = backup
        self._dtype = dtype
        self._places: dict[tuple[int, str], weakref.ref[Module]] = {}  # by id and name
        self._attributes: list[_Attributes] = []
        self._scripts: Any = WeakTensorKeyDictionary()  # low-precision tensors of the script's own

    def note(self) -> None:
        """Note the tensors that are in low precision before the call: they stay as they are."""
        for _, before in self._backup.attributes:
            for name, value in before.items():
                if name not in TORCHS:
                    self._map(value, self._note)

    def lift(self) -> None:
        """Cast to fp32 what the call has put there.

        Containers are searched for new tensors after the first calls, attributes after all.
        """
        for slot, name in self._backup.changed_buffers():
            buffer = slot.get(name)
            if buffer is not None:  # it was not deleted
                slot[name] = self._change(buffer)
        for part, before in self._backup.attributes:
            for name, value in list(vars(part).items()):  # other threads
                new = value is not before.get(name) or type(value) in CONTAINERS
                if new and name not in TORCHS and self._map(value, self._change) is not value:
                    self._places[id(part), name] = weakref.ref(part)
        if self._backup.watched:
            parts = (part for part, _ in self._backup.attributes)
            self._attributes = [
                _Attributes(part)
                for part in parts
                if not type(part).__module__.startswith("torch.nn.")
            ]
        for attributes in self._attributes:
            attributes.change(self._change)
        for (_, name), ref in list(self._places.items()):
            holder = ref()
            values = {} if holder is None else vars(holder)
            if name in values:
                values[name] = self._lifted(values[name])

    def _lifted(self, value: Any) -> Any:
        lifted = self._map(value, self._change)
        if lifted is value or type(value) not in CONTAINERS:
            return lifted
        # In place: others may hold the container too.
        if type(value) is dict:
            value.update(lifted)
        else:
            for at, item in enumerate(lifted):
                value[at] = item
        return value

    def _map(self, value: Any, change: Callable[[Tensor], Tensor]) -> Any:
        try:
            return map_tensors(value, change)
        except RecursionError:  # it holds itself
            return value

    def _note(self, tensor: Tensor) -> Tensor:
        if tensor.dtype is self._dtype:
            self._scripts[tensor] = True
        return tensor

    def _change(self, tensor: Tensor) -> Tensor:
        low = tensor.dtype is self._dtype and tensor not in self._scripts
        return lift(tensor) if low else tensor


def allow_numpy(live: Callable[[], bool], undo: ExitStack) -> None:
    """Have ``Tensor.numpy`` return bf16 tensors in fp32: NumPy has no bf16, and torch raises."""

    def make(original: Any) -> Any:
        def numpy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if tensor.dtype is torch.bfloat16 and live():
                return original(tensor.float(), *args, **kwargs)
            return original(tensor, *args, **kwargs)

        pass_over(numpy)
        return numpy

    patching.wrap(Tensor, "numpy", make, undo, Reading.AMP)
