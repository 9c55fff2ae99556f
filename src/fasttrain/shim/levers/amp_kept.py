"""Gives the script fp32 where it gets at low-precision tensors past the output of a root."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.weak import WeakTensorKeyDictionary

from fasttrain.shim.casting import map_tensors
from fasttrain.shim.eager import pass_over
from fasttrain.shim.levers.amp_backup import CONTAINERS, Backup, Store
from fasttrain.shim.lifted import lift

TORCHS = frozenset(vars(Module()))


class KeptTensors:
    """Where a root's call keeps low-precision tensors beside what it returns.

    Such places are attributes and buffers of its modules, globals that a forward names, and lists,
    dictionaries and objects that it is handed. They are found while calls are watched.

    Args:
        backup: The root's state before a call.
        dtype: The low precision.
    """

    def __init__(self, backup: Backup, dtype: torch.dtype) -> None:
        self._backup = backup
        self._dtype = dtype
        self._places: dict[tuple[int, str], weakref.ref[Any]] = {}  # by id and name
        self._scripts: Any = WeakTensorKeyDictionary()  # low-precision tensors of the script's own

    def meet_own(self) -> None:
        """Note which tensors are low before the call already: they stay as they are."""
        for store in self._backup.stores:
            for value in store.before.values():
                self._map(value, self._note)
        for value in self._backup.given:
            self._map(value, self._note)

    def lift(self) -> None:
        """Cast to fp32 what the call has put there."""
        for slot, name in self._backup.changed_buffers():
            buffer = slot.get(name)
            if buffer is not None:  # nor deleted
                slot[name] = self._change(buffer)
        for store in self._backup.stores:
            self._look_through(store)
        for container in self._backup.given:
            self._backup.looks_at_arguments |= self._changes(container)
            self._lifted(container)
        for (_, name), ref in list(self._places.items()):
            holder = ref()
            values = {} if holder is None else vars(holder)
            if name in values:
                values[name] = self._lifted(values[name])

    def _look_through(self, store: Store) -> None:
        for name, value in store.now().items():
            new = value is not store.before.get(name) or type(value) in CONTAINERS
            if not new or name in TORCHS or not self._changes(value):
                continue
            if isinstance(store.holder, Module | ModuleType):
                self._places[id(store.holder), name] = weakref.ref(store.holder)
            else:
                self._backup.looks_at_arguments = True
                vars(store.holder)[name] = self._lifted(value)

    def _lifted(self, value: Any) -> Any:
        lifted = self._map(value, self._change)
        if lifted is value or type(value) not in CONTAINERS:
            return lifted
        # Others may hold it too.
        if type(value) is dict:
            value.update(lifted)
        else:
            for at, item in enumerate(lifted):
                value[at] = item
        return value

    def _changes(self, value: Any) -> bool:
        return self._map(value, self._change) is not value

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
    """Have ``Tensor.numpy`` give a bf16 tensor in fp32; NumPy has no bf16, and torch raises."""
    original: Any = Tensor.numpy

    def numpy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype is torch.bfloat16 and live():
            return original(tensor.float(), *args, **kwargs)
        return original(tensor, *args, **kwargs)

    pass_over(numpy)
    setattr(Tensor, "numpy", numpy)  # noqa: B010
    undo.callback(delattr, Tensor, "numpy")  # torch's own is inherited
