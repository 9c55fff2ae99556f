"""Replays a loop without computing, up to the batch before which its snapshot was taken.

All of the script's own code runs, so that its variables, counters and schedules get the values that
they had. What takes time is skipped: a root returns the like of what it returned then, a backward
pass leaves zero gradients where it left any, steps of torch's optimizers see no gradients, and
existing files stay. Optimizers and hooks of the script's own see the zeros, since they may rely on
gradients; whatever their steps change is restored at the place of the snapshot. Models and backward
passes are real in two cases: if the script has hooks on gradients, which must be called; and if its
first step left gradients on tensors of no model or optimizer, such as perturbations of inputs.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.containers import graph_behind
from fasttrain.shim.hooks.roots import Call, Root, RootCalls
from fasttrain.shim.hooks.seams import Differentiating
from fasttrain.shim.snapshots.object_states import Registry, untrained
from fasttrain.shim.snapshots.replayed_files import LeftFiles
from fasttrain.shim.snapshots.root_outputs import UNKNOWN, RootOutputs
from fasttrain.shim.snapshots.scalar_reads import GradientHooks


class Replay:
    """Replaces everything that computes.

    Attributes:
        computed: How many calls of roots had to be computed.
        files: Keeps existing files unchanged.
        trained: The parameters that were trained, as `trained_parameters` returns them.
    """

    def __init__(
        self,
        roots: RootCalls,
        registry: Registry,
        hooks: GradientHooks,
        outputs: RootOutputs,
        files: LeftFiles,
    ) -> None:
        self.computed = 0
        self._roots, self._registry, self._hooks = roots, registry, hooks
        self._outputs = outputs
        self._zeros: dict[int, tuple[Tensor, Tensor]] = {}
        self._withheld: list[tuple[Tensor, Tensor]] = []
        self.files = files
        self.trained: list[tuple[list[str], list[int]]] = []
        self._untrained: dict[int, Tensor] = {}  # those that no backward pass reaches, by id
        self._going = self._real = False

    def install(self, undo: ExitStack) -> None:
        """Wrap functions such as ``grad`` before the script imports them under its own names."""
        for name, act in (("backward", self._backward), ("grad", _zero_gradients)):
            instead = functools.partial(self._instead, name, act)
            patching.wrap(torch.autograd, name, instead, undo, Differentiating.REPLAY)
        # Registered now: torch iterates over its hooks in a step, so that none can be added in one.
        undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        undo.callback(register_optimizer_step_post_hook(self._after_step).remove)

    def begin(self, undo: ExitStack) -> None:
        """Skip all computation from now on, until ``undo`` is closed."""
        undo.callback(self._end)
        self._going = True
        undo.callback(setattr, self._roots, "around", self._roots.around)
        self._roots.around = self._around
        self.files.begin(undo)

    def _end(self) -> None:
        self._going = False
        self._zeros.clear()
        self._untrained.clear()

    def _instead(self, name: str, act: Call, original: Any) -> Any:
        """Have ``act`` run in place of a function while a replay is under way."""

        @functools.wraps(original)
        def instead(*args: Any, **kwargs: Any) -> Any:
            if not self._going and name == "backward":
                self._look(*args, **kwargs)
            if not self._going or self._is_real:
                return original(*args, **kwargs)
            return act(*args, **kwargs)

        return instead

    # --- roots

    def _around(self, root: Root, module: nn.Module, call: Call) -> Call:
        outputs = self._outputs
        if self._is_real or _has_hooks(module) or outputs.apart():
            self.computed += 1
            return call  # the script depends on what happens inside the call

        def run(*args: Any, **kwargs: Any) -> Any:
            made = outputs.again(root)
            if made is not UNKNOWN:
                return made
            # The inner call alone: what averages gradients outside of it would wait for a
            # backward pass that never comes.
            self.computed += 1
            output = call(*args, **kwargs)
            outputs.see(root, output)
            made = outputs.again(root)
            return output if made is UNKNOWN else made

        return run

    # --- gradients

    @property
    def _is_real(self) -> bool:
        """True if models and backward passes have to be real."""
        return self._real or self._hooks.there

    def _look(self, tensors: Any, *_: Any, **__: Any) -> None:
        """Check the first step's real backward pass for gradients that zeros couldn't replace."""
        outputs = tensors if isinstance(tensors, list | tuple) else (tensors,)
        leaves = graph_behind(outputs)[1]
        groups = [g for o in self._registry.of("optimizers") for g in o.param_groups]
        known = {id(p) for group in groups for p in group["params"]}
        for module in self._registry.outermost():
            known.update(map(id, nn.Module.parameters(module)))
        self._real = self._real or any(id(leaf) not in known for leaf in leaves)

    def _backward(self, *_: Any, **__: Any) -> None:
        for optimizer in self._registry.of("optimizers"):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    reached = parameter.requires_grad and id(parameter) not in self._untrained
                    if reached and parameter.grad is None:
                        parameter.grad = self._zero(parameter)

    def _zero(self, parameter: Tensor) -> Tensor:
        known = self._zeros.get(id(parameter))
        if known is None or known[0] is not parameter or known[1].shape != parameter.shape:
            known = self._zeros[id(parameter)] = (parameter, torch.zeros_like(parameter))
        return known[1]

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._going:  # after a real backward pass
            self._untrained |= {id(p): p for p in untrained(optimizer, self.trained)}
        if not self._going or _is_the_scripts(optimizer):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._withheld.append((parameter, parameter.grad))
                    parameter.grad = None

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._going and _is_the_scripts(optimizer):
            for known in self._zeros.values():
                known[1].zero_()  # the step may have changed it
        for parameter, gradient in self._withheld:
            parameter.grad = gradient
        self._withheld.clear()


def _is_the_scripts(optimizer: Optimizer) -> bool:
    """True if code of the script's, or of a library's, sees the gradients in its step."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(hooks) or not type(optimizer).__module__.startswith("torch.optim.")


def _has_hooks(module: nn.Module) -> bool:
    parts = nn.Module.modules(module)
    return any(part._forward_hooks or part._forward_pre_hooks for part in parts)


def _zero_gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(inputs, Mapping):  # torch 2.13
        gradients = _zero_gradients(outputs, list(inputs.values()), *args, **kwargs)
        return dict(zip(inputs, gradients, strict=True))
    wanted = (inputs,) if isinstance(inputs, Tensor) else inputs
    return tuple(torch.zeros_like(one, requires_grad=True) for one in wanted)


class SilencedStdout:
    """Redirects file descriptor 1 to /dev/null: what a replay prints was printed before."""

    def __init__(self) -> None:
        self._kept = -1

    def begin(self) -> None:
        """Redirect."""
        _flush_stdout()
        self._kept = os.dup(1)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)

    def keep(self) -> None:
        """Leave it as it is for good, as in a forked child."""
        self._kept = -1

    def end(self) -> None:
        """Restore stdout; do nothing if it is not redirected."""
        if self._kept >= 0:
            _flush_stdout()
            os.dup2(self._kept, 1)
            os.close(self._kept)
            self._kept = -1


def _flush_stdout() -> None:
    """Flush stdout, and the stream below an object of the script's in its place.

    Many scripts write to a file as well by such an object, whose ``flush`` does nothing, or which
    has none.
    """
    streams: tuple[Any, ...] = (sys.stdout, sys.__stdout__)
    for stream in streams:
        with suppress(Exception):
            stream.flush()
