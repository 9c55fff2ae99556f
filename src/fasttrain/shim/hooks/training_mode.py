"""Finds whether the script is training or evaluating at the moment."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from fasttrain.shim.hooks.roots import Root, RootCalls, parameters_of

NO_GRADIENTS = "read without gradients"
NO_OPTIMIZER = "read before there is an optimizer"
IN_EVAL = "read while the model is in eval mode"


class TrainingState:
    """Follows the optimizers, and the modules that are in training mode.

    Attributes:
        on_zero_grad: Called after gradients were cleared.
    """

    def __init__(self, roots: RootCalls) -> None:
        self._roots = roots
        # Read at every step, for which a WeakSet is slow
        self._optimizers: dict[weakref.ref[Optimizer], None] = {}
        self.on_zero_grad: list[Callable[[], None]] = []
        self._modules: weakref.WeakSet[Module] = weakref.WeakSet()

    def install(self, undo: ExitStack) -> None:
        """Watch the making of optimizers, ``train()`` and ``eval()``, and the roots."""
        self._watch(Optimizer, "__init__", self._add_optimizer, undo)
        self._watch(Module, "train", self._modules.add, undo)
        for owner in (Optimizer, Module):
            self._watch(owner, "zero_grad", self._zeroed, undo)
        self._roots.on_discover.append(self._add_root)
        undo.callback(self._roots.on_discover.remove, self._add_root)

    def _watch(self, owner: Any, name: str, told: Any, undo: ExitStack) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(holder: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(holder, *args, **kwargs)
            if not torch.compiler.is_compiling():
                told(holder)
            return result

        undo.callback(setattr, owner, name, original)
        setattr(owner, name, watched)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that are alive, in the order of their construction."""
        return [o for ref in list(self._optimizers) if (o := ref()) is not None]

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _add_optimizer(self, optimizer: Optimizer) -> None:
        self._optimizers[weakref.ref(optimizer, self._optimizers.pop)] = None

    def _zeroed(self, _: Any) -> None:
        for listen in self.on_zero_grad:
            listen()

    def _add_root(self, _: Root, module: Module) -> None:
        self._modules.add(module)

    def trained(self) -> set[int]:
        """Return the ids of the parameters of all optimizers."""
        return {id(parameter) for group in self.groups() for parameter in group["params"]}

    def why_not_training(self) -> str:
        """Return why a loader that is started now is not for training; empty if it is."""
        if not torch.is_grad_enabled():
            return NO_GRADIENTS
        trained = self.trained()
        if not trained:
            return NO_OPTIMIZER
        models = [
            module
            for module in self._modules
            if any(id(parameter) in trained for parameter in parameters_of(module))
        ]
        if models and not any(module.training for module in models):
            return IN_EVAL
        return ""
