"""Records where a training loop waits for its device, or would on a real one."""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fasttrain

PACKAGE = str(Path(fasttrain.__file__).parent)
READ = "a number is read"
FROM_DEVICE = "a copy to the host"
FROM_HOST = "a copy from pageable memory"
SHAPE = "a shape depends on numbers"
WAIT = "a wait"

aten = torch.ops.aten
# Operators whose result has a shape that depends on numbers, or is a number of the host's.
# Source: those of which CUDA's kernels copy to the host, aten/src/ATen/native/cuda, torch 2.13
_SHAPES = {
    *(aten.nonzero, aten.masked_select, aten.unique_dim, aten.unique_consecutive, aten._unique2),
    *(aten.unique_dim_consecutive, aten.bincount, aten.equal, aten.argwhere),
}
_MASKED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
_COPIES = {aten.copy_, aten._foreach_copy_}


class Synchronizations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operator before it runs, in backward passes and compiled graphs, too.

    Args:
        device: Torch's type of the device.

    Attributes:
        step: The step of the loop, which the loop sets.
        found: What synchronised, and the function that did, each with the steps.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step = 0
        self.found: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        self._device = device

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile, though a mode is active."""
        return True

    def note(self, what: str) -> None:
        """Record a synchronisation by the function that is running."""
        self.found[what, _where(sys._getframe(1))].append(self.step)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        what = self._what(func, args, kwargs)
        if what:
            self.note(what)
        return func(*args, **kwargs)

    def _what(self, func: Any, args: Any, kwargs: dict[str, Any]) -> str:
        operator = func.overloadpacket
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = [self._is_here(tensor) for tensor in tensors]
        if operator is aten._to_copy and kwargs.get("device") is not None:
            goes = torch.device(kwargs["device"]).type == self._device
            return self._copy(args[0], goes, kwargs.get("non_blocking", False))
        if operator in _COPIES:
            unblocked = kwargs.get("non_blocking", len(args) > 2 and args[2])
            return self._copy(tensors[-1], here[0], unblocked, pinned=tensors[0])
        if not any(here):
            return ""
        if operator is aten._local_scalar_dense:
            return READ
        if operator is aten.lift_fresh:  # what torch.tensor() makes of Python's numbers
            return FROM_HOST
        masks = (torch.bool, torch.uint8)
        masked = operator in _MASKED and any(
            t is not None and t.dtype in masks for t in tree_leaves(args[1])
        )
        return SHAPE if operator in _SHAPES or masked else ""

    def _copy(self, source: Tensor, goes: bool, unblocked: bool, pinned: Any = None) -> str:
        """Return what a copy does, to the device or from it; nothing if it is within one."""
        if self._is_here(source) == goes:
            return ""
        host = source if goes else pinned
        if unblocked and host is not None and host.is_pinned():
            return ""
        return FROM_HOST if goes else FROM_DEVICE

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device


def _where(frame: FrameType | None) -> str:
    """Return the innermost function of fasttrain's that is running; else the script."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            path = frame.f_code.co_filename.removeprefix(f"{PACKAGE}/shim/")
            return f"{path}: {frame.f_code.co_qualname}"
        frame = frame.f_back
    return "the script"


@contextlib.contextmanager
def recording(device: str) -> Iterator[Synchronizations]:
    """Record what synchronises with devices of a type inside of the block."""
    recorder = Synchronizations(device)
    module = getattr(torch, device)

    def waits(*_: Any, **__: Any) -> None:
        recorder.note(WAIT)

    with contextlib.ExitStack() as undo:
        for owner in (module, module.Event, module.Stream):
            undo.enter_context(mock.patch.object(owner, "synchronize", waits))
        undo.enter_context(recorder)
        yield recorder


# A call of a root inside of a dispatch mode that isn't fasttrain's runs whole on each rank.
Synchronizations.__module__ = "fasttrain.rehearsal"
