"""All that a training loop changes: modules, optimizers, schedulers and scalers, as they are made.

The order in which a script makes them names them from one run to the next.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections import deque
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

_TORCHS = frozenset(vars(Module()))  # attributes that every module has


class Registry:
    """The objects of one process, weakly."""

    def __init__(self) -> None:
        self._made: dict[str, list[weakref.ref[Any]]] = {}

    def install(self, undo: ExitStack) -> None:
        """Follow the making of such objects; a deep copy of a module is one as well."""
        self._follow(Module, "__init__", "modules", undo)
        self._follow(Module, "__setstate__", "modules", undo)
        self._follow(Optimizer, "__init__", "optimizers", undo)
        self._follow(LRScheduler, "__init__", "schedulers", undo)
        if not issubclass(ReduceLROnPlateau, LRScheduler):  # up to torch 2.1
            self._follow(ReduceLROnPlateau, "__init__", "schedulers", undo)
        self._follow(GradScaler, "__init__", "scalers", undo)

    def _follow(self, owner: Any, name: str, kind: str, undo: ExitStack) -> None:
        original, made = getattr(owner, name), self._made.setdefault(kind, [])

        @functools.wraps(original)
        def followed(made_one: Any, *args: Any, **kwargs: Any) -> None:
            original(made_one, *args, **kwargs)
            if not torch.compiler.is_compiling():
                made.append(weakref.ref(made_one, made.remove))

        undo.callback(setattr, owner, name, original)
        setattr(owner, name, followed)

    def of(self, kind: str) -> list[Any]:
        """Give the living ones of a kind, in the order in which they were made, each once."""
        living = [one for ref in self._made[kind] if (one := ref()) is not None]
        return list({id(one): one for one in living}.values())

    def outermost(self) -> list[Module]:
        """Give the modules that are part of no other one, and hold a tensor."""
        gc.collect()  # or what is dead, and only held by a cycle, would be counted by chance
        # What wraps a model to average its gradients comes and goes with the run.
        modules = [m for m in self.of("modules") if not isinstance(m, DistributedDataParallel)]
        parts = {id(part) for module in modules for part in module._modules.values()}
        return [m for m in modules if id(m) not in parts and _holds_tensors(m)]


def _holds_tensors(module: Module) -> bool:
    """Whether it may: an average of weights may be a module with a dictionary, and nothing else."""
    for part in Module.modules(module):
        own = (value for name, value in vars(part).items() if name not in _TORCHS)
        if part._parameters or part._buffers:
            return True
        if any(isinstance(value, Tensor | dict | list | deque) for value in own):
            return True
    return False
