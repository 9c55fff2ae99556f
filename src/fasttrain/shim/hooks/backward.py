"""Notices when the script calls ``backward()`` on a tensor.

A descriptor in place of ``Tensor.backward`` sees the attribute lookup and returns torch's own
method. A wrapper would put a frame of fasttrain's into every traceback of a backward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.dynamo_skip import pass_over

See = Callable[[Tensor, CodeType, int], None]


def on_backward(see: See, undo: ExitStack) -> None:
    """Call ``see`` before each call of ``backward`` with the tensor and the caller's instruction.

    A lookup counts as a call. Lookups inside a function that torch.compile traces are not reported.
    """
    backward = vars(Tensor)["backward"]
    if not isinstance(backward, _Backward):
        pass_over(_Backward.__get__, all_it_calls=True)
        gone = ExitStack()
        backward = patching.wrap(Tensor, "backward", _Backward, gone)
        backward.gone = gone.close
    backward.listeners.append(see)
    undo.callback(backward.leave, see)


class _Backward:
    """A descriptor in place of ``Tensor.backward`` that returns torch's method."""

    def __init__(self, torchs: Any) -> None:
        self.torchs = torchs
        self.listeners: list[See] = []
        self.gone: Callable[[], None] = lambda: None  # puts torch's back

    def leave(self, see: See) -> None:
        self.listeners.remove(see)
        if not self.listeners:
            self.gone()

    def __get__(self, tensor: Tensor | None, owner: type[Tensor]) -> Any:
        if tensor is None:
            return self.torchs
        if not torch.compiler.is_compiling():
            caller = sys._getframe(1)
            for see in self.listeners:
                see(tensor, caller.f_code, caller.f_lasti)
        return self.torchs.__get__(tensor, owner)
