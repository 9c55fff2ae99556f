"""Finds out whether the script has hooks on gradients, which only a real backward pass calls.

``retain_grad()`` counts as one: only a real backward pass fills what it retains.
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

# The functions that register hooks, with the namespace in which callers look each one up.
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
# Files of fasttrain that forward a script's registration; its levers register none of their own.
_PASSING = (
    os.path.join("shim", "levers", ""),  # noqa: PTH118
    os.path.join("shim", "data_parallel", ""),  # noqa: PTH118
    hook_wrappers.__file__,
    lifted.__file__,
    seams.__file__,
)


class GradientHooks:
    """Notices when the script registers a hook.

    Attributes:
        there: True if it has registered one.
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
        """True if the caller is the script, and not torch or fasttrain for their own use."""
        while frame is not None and any(it in frame.f_code.co_filename for it in _PASSING):
            frame = frame.f_back
        return frame is not None and not frame.f_code.co_filename.startswith(self._own)
