"""Finds whether the script is training or evaluating at the moment."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.roots import Root, RootCalls, parameters_of
from fasttrain.shim.hooks.seams import Training, then

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
        patching.wrap(Optimizer, "__init__", then(self._add_optimizer), undo, Training.RANKS)
        patching.wrap(Module, "train", then(self._modules.add), undo)
        for owner in (Optimizer, Module):
            patching.wrap(owner, "zero_grad", then(self._zeroed), undo, Training.RANKS)
        self._roots.on_discover.append(self._add_root)
        undo.callback(self._roots.on_discover.remove, self._add_root)

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
