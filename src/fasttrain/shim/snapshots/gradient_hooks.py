"""Whether the script has hooks on gradients, which only a real backward pass calls.

``retain_grad()`` is one of them: what is kept only a real pass leaves.
"""

from __future__ import annotations

import functools
import os
import sys
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as modules

from fasttrain.shim.hooks import hook_wrappers, lifted, patching, seams
from fasttrain.shim.hooks.seams import Hooking
from fasttrain.shim.process.callsite import own_prefixes

# What registers them: each name where it is looked up.
REGISTRATIONS: tuple[tuple[Any, str], ...] = (
    (Tensor, "register_hook"),
    (Tensor, "retain_grad"),
    (Tensor, "register_post_accumulate_grad_hook"),  # torch 2.1
    (Module, "register_full_backward_hook"),
    (Module, "register_full_backward_pre_hook"),
    (Module, "register_backward_hook"),
    (modules, "register_module_full_backward_hook"),
    (modules, "register_module_full_backward_pre_hook"),
    (modules, "register_module_backward_hook"),
    (torch.autograd.graph, "register_multi_grad_hook"),
)
# What passes a registration of the script's on: levers register none themselves.
_PASSING = (
    os.path.join("shim", "levers", ""),  # noqa: PTH118
    os.path.join("shim", "data_parallel", ""),  # noqa: PTH118
    hook_wrappers.__file__,
    lifted.__file__,
    seams.__file__,
)


class GradientHooks:
    """Notices that the script registers a hook.

    Attributes:
        there: Whether it has registered one since it began.
    """

    def __init__(self) -> None:
        self.there = False
        self._own = own_prefixes()

    def install(self, undo: ExitStack) -> None:
        """Watch for hooks."""
        for owner, name in REGISTRATIONS:
            if hasattr(owner, name):
                patching.wrap(owner, name, self._watched, undo, Hooking.SNAPSHOTS)

    def _watched(self, original: Any) -> Any:
        @functools.wraps(original)
        def register(*args: Any, **kwargs: Any) -> Any:
            if not self.there and not torch.compiler.is_compiling():
                self.there = self._by_script(sys._getframe(1))
            return original(*args, **kwargs)

        return register

    def _by_script(self, frame: FrameType | None) -> bool:
        """Return whether the script registers it, and not torch or fasttrain for themselves."""
        while frame is not None and any(it in frame.f_code.co_filename for it in _PASSING):
            frame = frame.f_back
        return frame is not None and not frame.f_code.co_filename.startswith(self._own)
