"""The gradients that loss scaling multiplies, divides and checks, grouped by their optimizers."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Container, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module
from torch.optim import Optimizer

from fasttrain.model.errors import FasttrainError
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.containers import graph_behind
from fasttrain.shim.hooks.gradients import made_by
from fasttrain.shim.hooks.roots import Root, parameters_of
from fasttrain.shim.hooks.seams import Hooking
from fasttrain.shim.process.refusal import refuse

# Errors of scripts and devices for which fp16's loss scaling can't be right.


def require_infinity(kind: str) -> None:
    """Refuse an NPU whose arithmetic saturates at overflow, whatever the plan assumed.

    The driver does so with INF_NAN_MODE_ENABLE=0 and INF_NAN_MODE_FORCE_DISABLE=1.

    Raises:
        SystemExit: ``amp-fp16``.
    """
    torch_npu: Any = sys.modules.get("torch_npu")
    if kind == "npu" and torch_npu and not torch_npu.npu.utils.is_support_inf_nan():
        refuse(_saturation_refused())


def _saturation_refused() -> FasttrainError:
    return FasttrainError(
        "fp16 can't train on this NPU, which saturates instead of overflowing",
        why="torch_npu reports that it has no inf, by which loss scaling finds the steps to skip",
        fix="unset INF_NAN_MODE_ENABLE, or use --amp bf16 or --amp off",
        slug="amp-fp16",
    )


def step_refused(optimizer: str) -> FasttrainError:
    """Return the error of an optimizer that steps inside the backward pass."""
    return FasttrainError(
        f"fp16 can't train with {optimizer} stepping inside the backward pass",
        why="whether its gradients overflowed is known only after the backward pass",
        fix="use --amp bf16 or --amp off",
        slug="fp16-step-in-backward",
    )


def closure_refused(optimizer: str) -> FasttrainError:
    """Return the error of a step that calls its closure after it has begun."""
    return FasttrainError(
        f"fp16 can't train with {optimizer} and a closure",
        why="its step has already begun when it runs the closure's backward passes, so an overflow"
        " can't be skipped any more",
        fix="use --amp bf16 or --amp off",
        slug="fp16-closure",
    )


def complex_refused() -> FasttrainError:
    """Return the error of complex parameters."""
    return FasttrainError(
        "fp16 can't train complex parameters",
        why="torch.amp's GradScaler, which divides the gradients, has no kernel for complex ones",
        fix="use --amp bf16 or --amp off",
        slug="fp16-complex",
    )


def inputs_refused() -> FasttrainError:
    """Return the error of a backward pass whose ``inputs`` are not leaves."""
    return FasttrainError(
        "fp16 can't make a backward pass for inputs= that are not leaves",
        why="torch prints a warning when the gradients that it leaves there are read, so they can't"
        " be divided by the scale unnoticed",
        fix="call retain_grad() on them instead, or use --amp bf16 or --amp off",
        slug="fp16-inputs",
    )


# Gradients that a backward pass leaves on tensors that belong to no optimizer and no module.
#
# Such tensors are inputs of adversarial training, tensors that the script trains by hand, and
# those with ``retain_grad()``. They are found before each backward pass by a walk through its
# graph, at 0.5 us a node. Gradients that they have from earlier passes are set aside, and never
# scaled.


class OtherTensors:
    """Keeps the other tensors that get a gradient in the backward pass that is running."""

    def __init__(self) -> None:
        self._kept: dict[int, weakref.ref[Tensor]] = {}  # by retain_grad()
        # Weak references: re-entrant checkpoints make tensors during a pass and drop them.
        self._reached: dict[int, weakref.ref[Tensor]] = {}
        self._aside: list[tuple[Tensor, Tensor]] = []

    def install(self, undo: ExitStack) -> None:
        """Watch for calls of ``retain_grad()``."""
        patching.wrap(Tensor, "retain_grad", self._watched, undo, Hooking.LOSS_SCALING)

    def _watched(self, original: Any) -> Any:
        kept = self._kept

        @functools.wraps(original)
        def retain_grad(tensor: Tensor) -> None:
            original(tensor)
            if not tensor.is_leaf and not torch.compiler.is_compiling():
                key = id(tensor)
                kept[key] = weakref.ref(tensor, lambda _: kept.pop(key, None))

        return retain_grad

    def reach(self, outputs: Sequence[Any], known: Container[int], *, leaves: bool = True) -> None:
        """Find the tensors that a pass from `outputs` leaves gradients on.

        Args:
            outputs: Where it begins.
            known: Ids of the tensors to leave out: those of optimizers and modules.
            leaves: Whether leaves get a gradient.
        """
        nodes, variables = graph_behind(outputs)
        kept = [ref() for ref in self._kept.values()]
        found: list[Tensor] = [t for t in kept if t is not None and made_by(t) in nodes]
        if leaves:
            found += variables
            found += [t for t in outputs if isinstance(t, Tensor) and t.is_leaf]
        for tensor in found:
            key = id(tensor)
            met = self._reached.get(key)
            if key not in known and (met is None or met() is not tensor):
                self._add(key, tensor)

    def _add(self, key: int, tensor: Tensor) -> None:
        if tensor.is_complex():
            refuse(complex_refused())
        self._reached[key] = weakref.ref(tensor)
        if tensor.grad is not None:
            self._aside.append((tensor, tensor.grad))
            tensor.grad = None

    def present(self) -> list[Tensor]:
        """Return the tensors that were found and still exist."""
        return [tensor for ref in self._reached.values() if (tensor := ref()) is not None]

    def finish(self, *, drop: bool = False) -> None:
        """Add the gradients that were set aside to those that the pass has left.

        Args:
            drop: Drop what the pass has left, because the pass will be repeated.
        """
        if drop:
            for tensor in self.present():
                tensor.grad = None
        for tensor, earlier in self._aside:
            now = tensor.grad
            if now is None:
                tensor.grad = earlier
            elif tensor.is_leaf and not (now.requires_grad or earlier.requires_grad):
                tensor.grad = earlier.add_(now)  # in place, as torch does
            else:
                tensor.grad = earlier + now
        self._aside = []
        self._reached = {}


# The gradients that loss scaling multiplies, divides and checks, grouped by their optimizers.


class _Group:
    """Parameters that are trained by the same optimizers, in the shape GradScaler reads.

    Attributes:
        param_groups: One group, as of an optimizer.
        owners: Ids of the optimizers; empty for parameters that no optimizer has.
        found: Per device, a tensor that is above 0 if the last pass left an inf or NaN.
        zeroed: Whether the script has set the gradients to zero since that pass.
    """

    def __init__(self, owners: frozenset[int]) -> None:
        self.parameters: list[Tensor] = []
        self.param_groups = [{"params": self.parameters}]
        self.owners = owners
        self.found: dict[torch.device, Tensor] = {}
        self.zeroed = False

    def drop_overflow(self) -> None:
        """Zero the gradients if one overflowed: without an optimizer no step can be skipped."""
        for gradient in self.gradients():
            gradient.masked_fill_(self.found[gradient.device] > 0, 0.0)

    def gradients(self) -> list[Tensor]:
        """Return the gradients that exist; of sparse ones, their values."""
        return [gradient for _, gradient in self.pairs()]

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters that have a gradient, each with its gradient."""
        present = [(p, p.grad) for p in self.parameters if p.grad is not None]
        return [(p, grad._values() if grad.is_sparse else grad) for p, grad in present]


class Gradients:
    """All gradients that a backward pass may leave: of optimizers, of roots, and all others.

    Groups are formed as a pass begins, and hold until the next one begins. What a script adds
    between them has no part in what the last pass has found.
    """

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._roots: weakref.WeakSet[Module] = weakref.WeakSet()
        self._others = OtherTensors()
        self._groups: list[_Group] = []
        self._grouped: frozenset[int] = frozenset()  # the ids of their parameters
        self._known: object = None  # whose parameters the groups have

    @property
    def optimized(self) -> bool:
        """True if the script has an optimizer; some scripts update their parameters by hand."""
        return bool(self._optimizers)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Add an optimizer's parameters."""
        self._optimizers.add(optimizer)
        self._known = None

    def add_root(self, _: Root, module: Module) -> None:
        """Add a module's parameters, which may be in no optimizer."""
        self._roots.add(module)
        self._known = None

    def install(self, undo: ExitStack) -> None:
        """Watch for calls of ``retain_grad()``."""
        self._others.install(undo)

    def begin(self, outputs: Sequence[Any], scale: Tensor) -> None:
        """Multiply the gradients that a pass from `outputs` will add to.

        Args:
            outputs: Where it begins.
            scale: The scale of the pass.
        """
        seen: set[int] = set()  # two parameters may share a gradient
        self._form_if_changed()
        for group in self._groups:
            by_device: dict[torch.device, list[Tensor]] = {}
            for parameter, gradient in group.pairs():
                if id(parameter.grad) in seen:
                    continue
                seen.add(id(parameter.grad))
                by_device.setdefault(gradient.device, []).append(gradient)
            with torch.no_grad():
                for device, gradients in by_device.items():
                    torch._foreach_mul_(gradients, scale.to(device))
        self._others.reach(outputs, self._grouped)

    def begin_inside(self, outputs: Sequence[Any]) -> None:
        """Prepare for a pass inside the running one, as a re-entrant checkpoint makes it."""
        self._others.reach(outputs, self._grouped)

    def begin_grad(self, outputs: Sequence[Any]) -> None:
        """Prepare for ``autograd.grad``, which returns its gradients and adds to no ``.grad``."""
        self._others.reach(outputs, self._grouped, leaves=False)

    def finish_grad(self, scaler: GradScaler, scale: Tensor, *, drop: bool) -> None:
        """Divide what ``autograd.grad`` left all the same; drop it if the pass is repeated.

        Tensors with ``retain_grad()`` get a gradient even then.
        """
        if not drop:
            self._unscale_others(scaler, scale)
        self._others.finish(drop=drop)

    def unscale(self, scaler: GradScaler, scale: Tensor) -> None:
        """Divide all gradients by the scale, and note which optimizers have an inf or NaN."""
        inverse = scale.double().reciprocal().float()
        seen: set[int] = set()
        for group in sorted(self._groups, key=lambda g: not g.owners):
            found = torch.zeros((), dtype=torch.float32, device=scale.device)
            like_optimizer: Any = _Group(group.owners)
            again: Any = _Group(group.owners)
            for parameter, _ in group.pairs():
                known = id(parameter.grad) in seen
                (again if known else like_optimizer).parameters.append(parameter)
                seen.add(id(parameter.grad))
            # Covers all present gradients, so also those that an earlier pass has left.
            group.zeroed = False
            group.found = scaler._unscale_grads_(like_optimizer, inverse, found, allow_fp16=True)
            if again.parameters:  # divided already: only checked
                one = torch.ones_like(inverse)
                for device, value in scaler._unscale_grads_(
                    again, one, found, allow_fp16=True
                ).items():
                    group.found[device] = torch.maximum(value, group.found.get(device, value))
            if not group.owners:
                group.drop_overflow()
        self._unscale_others(scaler, scale)
        self._others.finish()

    def _unscale_others(self, scaler: GradScaler, scale: Tensor) -> None:
        others = _Group(frozenset())
        others.parameters += self._others.present()
        if others.parameters:
            inverse = scale.double().reciprocal().float()
            found = torch.zeros((), dtype=torch.float32, device=scale.device)
            like_optimizer: Any = others
            others.found = scaler._unscale_grads_(like_optimizer, inverse, found, allow_fp16=True)
            others.drop_overflow()

    def found(self, optimizer: Optimizer) -> list[Tensor]:
        """Return scalars on the devices of an optimizer's gradients: 1 for inf or NaN, else 0.

        The optimizer may have been made, or given a parameter, after the pass that was checked.
        """
        key = id(optimizer)
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [
            found
            for group in self._groups
            if key in group.owners or any(id(p) in trained for p in group.parameters)
            for found in group.found.values()
        ]

    def update(self, scaler: GradScaler, stepped: set[int]) -> None:
        """Let the scale grow or back off by what was found since the last update.

        Args:
            scaler: Holds the scale.
            stepped: Ids of the optimizers that made a step since. If there are none, gradients
                count that the script has dropped, as it does if it finds them infinite itself.
                Those that it still accumulates wait for their step.
        """
        counted = {
            key: group.found
            for key, group in enumerate(self._groups)
            if group.found and (group.owners & stepped or (not stepped and self._dropped(group)))
        }
        if not counted:
            return
        for key, found in counted.items():
            state: Any = scaler._per_optimizer_states[key]
            state["found_inf_per_device"] = {d: value.clone() for d, value in found.items()}
        scaler.update()
        self.forget()

    def forget(self) -> None:
        """Forget the overflows that were found."""
        for group in self._groups:
            group.found = {}
            group.zeroed = False

    def _dropped(self, group: _Group) -> bool:
        if not group.owners:
            return not self.optimized  # without any optimizer each pass counts as a step
        return group.zeroed or all(p.grad is None for p in group.parameters)

    def on_zero_grad(self, optimizer: Optimizer | None) -> None:
        """Note that the gradients of an optimizer were set to zero; None if those of a module."""
        for group in self._groups:
            if optimizer is None or id(optimizer) in group.owners:
                group.zeroed = True

    def _form_if_changed(self) -> None:
        """Form the groups again if an optimizer, a root or an optimizer's parameter is another.

        The groups hold their parameters, so that no other one gets an id of theirs.
        """
        trained = [
            [id(p) for group in optimizer.param_groups for p in group["params"]]
            for optimizer in self._optimizers
        ]
        known = (trained, len(self._roots))
        # A script without an optimizer may replace parameters of modules in each step.
        if known != self._known or not trained:
            self._known = known
            self._groups = self._form()

    def _form(self) -> list[_Group]:
        owners: dict[int, set[int]] = {}
        parameters: dict[int, Tensor] = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameters[id(parameter)] = parameter
                    owners.setdefault(id(parameter), set()).add(id(optimizer))
        for root in self._roots:
            for parameter in parameters_of(root):
                parameters.setdefault(id(parameter), parameter)
        if any(p.is_complex() and p.requires_grad for p in parameters.values()):
            refuse(complex_refused())
        self._grouped = frozenset(parameters)
        formed: dict[frozenset[int], _Group] = {}
        for key, parameter in parameters.items():
            owned = frozenset(owners.get(key, ()))
            formed.setdefault(owned, _Group(owned)).parameters.append(parameter)
        return list(formed.values())
