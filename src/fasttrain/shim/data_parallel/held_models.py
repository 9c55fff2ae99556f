"""Keeps models on the host that don't fit their device whole, until they are sharded."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from fasttrain.model.vendors import LIKE_CUDA
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.device_clock import module_of


class HeldModels:
    """Keeps on the host what doesn't fit its device whole, until its first call shards it.

    FSDP moves one block after the other to the device, and keeps a part of each.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._devices: weakref.WeakKeyDictionary[nn.Module, torch.device] = (
            weakref.WeakKeyDictionary()
        )

    def install(self, undo: ExitStack) -> None:
        """Replace the methods that move a module."""
        for name in ("to", *LIKE_CUDA):
            if hasattr(nn.Module, name):
                patching.wrap(nn.Module, name, functools.partial(self._moves, name), undo)

    def device_of(self, module: nn.Module) -> torch.device | None:
        """Return where the script has moved a module that is held on the host; None if it isn't."""
        parts = [part for part in nn.Module.modules(module) if part in self._devices]
        return self._devices[parts[0]] if parts else None

    def release(self, module: nn.Module) -> None:
        """Forget a module: its shards are on its device."""
        for part in nn.Module.modules(module):
            self._devices.pop(part, None)

    def _moves(self, name: str, original: Any) -> Any:
        @functools.wraps(original)
        def move(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(module, *args, **kwargs)
            except RuntimeError as error:
                if type(error).__name__ != "OutOfMemoryError":
                    raise
            # Out of the except block, whose traceback refers to what has been moved.
            return self._hold(name, module, args, kwargs)

        return move

    def _hold(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> nn.Module:
        if name == "to":
            device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        else:
            device, dtype, layout = torch.device(name), None, None
        how = {"dtype": dtype, "memory_format": layout}
        self.hold(module, device, **{k: value for k, value in how.items() if value is not None})
        return module

    def hold(self, module: nn.Module, device: torch.device, **how: Any) -> None:
        """Move a module to the host, tell it, and note where the script has moved it.

        Args:
            module: The module.
            device: Where the script has moved it.
            how: Other arguments of its ``to``.
        """
        module.to(device="cpu", **how)
        self._devices[module] = device
        memory: Any = module_of(device)
        if memory is not None:
            memory.empty_cache()
        self._tell(
            f"{type(module).__name__} doesn't fit the {device.type} device of each rank whole: it"
            " stays on the host until its first call, which shards it"
        )
