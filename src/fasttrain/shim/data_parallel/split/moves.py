"""Moves only each rank's rows of a large batch to its device, until something needs all rows.

Every rank has the whole batch on its host, and needs only its own rows on its device. The script
gets a `LazyRows` from ``batch.to(device)``, which represents the whole batch. A split call uses the
rows that are there; anything else has the ranks gather all rows. Lines of the script at which that
happens more often than not move whole tensors from then on.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from fasttrain.model.vendors import LIKE_CUDA
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.data_parallel.split import row_operators
from fasttrain.shim.data_parallel.split.lazy_rows import LazyRows, Placement
from fasttrain.shim.data_parallel.split.rows import Rows
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.user_compile import OwnCompile

PATIENCE = 4  # tensors of a line that may be gathered before their share counts


class _MoveSite:
    """A line of the script that moves tensors of one kind.

    Attributes:
        moved: Number of tensors moved by rows.
        whole: How many of them were gathered after all.
    """

    moved = whole = 0

    @property
    def pays(self) -> bool:
        """True unless most tensors were gathered after all."""
        return self.whole < PATIENCE or 2 * self.whole <= self.moved


class Moves:
    """Wraps the methods by which the script moves tensors to a device.

    Args:
        ranks: All ranks.
        compiled: Knows what the script compiles itself: compiled code can't take `LazyRows`.
        meet: Checks that all ranks gather a tensor at the same line.
        counts: The receipt's counts.
    """

    def __init__(
        self,
        ranks: Ranks,
        compiled: OwnCompile,
        meet: Callable[[], None],
        counts: Counter[str],
    ) -> None:
        self._ranks, self._compiled, self._meet, self._counts = ranks, compiled, meet, counts
        self._places: dict[Any, _MoveSite] = {}
        self._moving = False

    def install(self, undo: ExitStack) -> None:
        """Replace the methods that move a tensor."""
        for name in ("to", *LIKE_CUDA):
            if hasattr(Tensor, name):
                patching.wrap(Tensor, name, self._by_rows, undo)

    def _by_rows(self, original: Any) -> Any:
        @functools.wraps(original)
        def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            small = type(tensor) is not Tensor or tensor.numel() < row_operators.LARGE
            if small or self._moving:  # npu() calls to()
                return original(tensor, *args, **kwargs)
            frame = sys._getframe(1)
            move = functools.partial(_call, original, args, kwargs)
            self._moving = True
            try:
                return self.move(tensor, move, (frame.f_code, frame.f_lasti))
            finally:
                self._moving = False

        return method

    def move(self, tensor: Tensor, move: Callable[[Tensor], Tensor], where: Any) -> Tensor:
        """Return a moved tensor, or a `LazyRows` of it with this rank's rows.

        Args:
            tensor: A large tensor.
            move: Moves it, or a part of it.
            where: The line of the script.
        """
        if not self._may_move(tensor):
            return move(tensor)
        nothing = move(tensor.narrow(0, 0, 0))
        place = self._places.setdefault((where, tensor.shape[1:], nothing.dtype), _MoveSite())
        if not leaves_host(nothing) or not place.pays:
            return move(tensor)
        rows = Rows(self._ranks, tensor.size(0))
        part = move(rows.cut(tensor, 0))
        if not part.is_contiguous():
            return move(tensor)
        place.moved += 1
        self._counts["moved by rows"] += 1
        like = torch.empty(tensor.shape, device="meta")
        return LazyRows(part, like, Placement(rows, 0, functools.partial(self._use, place)))

    def _may_move(self, tensor: Tensor) -> bool:
        if not tensor.dim() or not tensor.is_cpu:
            return False
        plain = tensor.layout is torch.strided and not tensor.is_quantized
        if not plain or not tensor.is_contiguous() or tensor.is_complex() or tensor.requires_grad:
            return False
        ranks = self._ranks
        if not ranks.joined or tensor.size(0) < ranks.world_size or self._compiled.functions:
            return False
        functional = torch._C._functorch.peek_interpreter_stack() is not None
        return not functional and threading.current_thread() is threading.main_thread()

    def _use(self, place: _MoveSite) -> None:
        place.whole += 1
        self._meet()


def _call(function: Any, args: Any, kwargs: Any, tensor: Tensor) -> Any:
    return function(tensor, *args, **kwargs)


def leaves_host(moved: Tensor) -> bool:
    """True if a tensor that was on the host is on a device."""
    return not moved.is_cpu
