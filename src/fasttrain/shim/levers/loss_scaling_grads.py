"""The gradients that loss scaling multiplies, divides and checks, grouped by their optimizers."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module
from torch.optim import Optimizer

from fasttrain.shim.roots import Root, parameters_of


class _Group:
    """Parameters that are trained by the same optimizers, in the shape GradScaler reads.

    Attributes:
        param_groups: One group, as of an optimizer.
        owners: The optimizers, by id; none for parameters that no optimizer has.
        found: Per device, a tensor that is above 0 if the last pass left an inf or nan.
        zeroed: Whether the script has set the gradients to zero since that pass.
    """

    def __init__(self, owners: frozenset[int]) -> None:
        self.parameters: list[Tensor] = []
        self.param_groups = [{"params": self.parameters}]
        self.owners = owners
        self.found: dict[torch.device, Tensor] = {}
        self.zeroed = False

    def drop_overflow(self) -> None:
        """Zero the gradients if one overflowed: no step of an optimizer is there to be skipped."""
        for gradient in self.gradients():
            gradient.masked_fill_(self.found[gradient.device] > 0, 0.0)

    def gradients(self) -> list[Tensor]:
        """Give the gradients there are, the values of sparse ones."""
        present = [p.grad for p in self.parameters if p.grad is not None]
        return [grad._values() if grad.is_sparse else grad for grad in present]


class Gradients:
    """All gradients that a backward pass may leave: of optimizers, of roots, of their inputs."""

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._roots: weakref.WeakSet[Module] = weakref.WeakSet()
        self._inputs: dict[int, weakref.ref[Tensor]] = {}
        self._groups: list[_Group] = []
        self._known = (-1, -1)

    @property
    def optimized(self) -> bool:
        """Whether the script has an optimizer; some update their parameters by hand."""
        return bool(self._optimizers)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Follow an optimizer's parameters."""
        self._optimizers.add(optimizer)
        self._known = (-1, -1)

    def add_root(self, _: Root, module: Module) -> None:
        """Follow a module's parameters, which an optimizer need not have."""
        self._roots.add(module)
        self._known = (-1, -1)

    def add_inputs(self, _: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Follow inputs that get a gradient of their own, as adversarial training uses."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
                key = id(value)
                self._inputs[key] = weakref.ref(value, partial(self._forget, key))

    def _forget(self, key: int, _: Any) -> None:
        self._inputs.pop(key, None)

    def multiply(self, scale: Tensor) -> None:
        """Bring gradients of earlier passes to the scale of the one that will add to them."""
        for group in self._current():
            by_device: dict[torch.device, list[Tensor]] = {}
            for gradient in group.gradients():
                by_device.setdefault(gradient.device, []).append(gradient)
            with torch.no_grad():
                for device, gradients in by_device.items():
                    torch._foreach_mul_(gradients, scale.to(device))

    def unscale(self, scaler: GradScaler, scale: Tensor) -> None:
        """Divide all gradients by the scale and remember which optimizers have an inf or nan."""
        inverse = scale.double().reciprocal().float()
        for group in self._current():
            found = torch.zeros((), dtype=torch.float32, device=scale.device)
            like_optimizer: Any = group
            # Of all gradients that are there now: what an earlier pass left is among them.
            group.zeroed = False
            group.found = scaler._unscale_grads_(like_optimizer, inverse, found, allow_fp16=True)
            if not group.owners:
                group.drop_overflow()

    def overflowed(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer's gradients hold an inf or nan; waits for the device."""
        key = id(optimizer)
        found = [f for g in self._current() if key in g.owners for f in g.found.values()]
        return any(bool(value.item()) for value in found)

    def update(self, scaler: GradScaler, stepped: set[int]) -> None:
        """Let the scale grow or back off by what was found since the last update.

        Args:
            scaler: Does it.
            stepped: The optimizers that made a step since, by id. Without any, what counts are
                gradients that the script dropped, as it does when it finds them infinite itself;
                those that it goes on accumulating wait for their step.
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
        """Have nothing left to count."""
        for group in self._groups:
            group.found = {}
            group.zeroed = False

    def _dropped(self, group: _Group) -> bool:
        if not group.owners:
            return not self.optimized  # a loop that updates by hand: each of its passes counts
        return group.zeroed or all(p.grad is None for p in group.parameters)

    def on_zero_grad(self, optimizer: Optimizer | None) -> None:
        """Note that gradients were set to zero; None for those of a module."""
        for group in self._groups:
            if optimizer is None or id(optimizer) in group.owners:
                group.zeroed = True

    def _current(self) -> list[_Group]:
        """Give the groups, formed anew when an optimizer, a root or a parameter came in."""
        trained = sum(len(g["params"]) for o in self._optimizers for g in o.param_groups)
        if (trained, len(self._roots)) != self._known:
            self._known = (trained, len(self._roots))
            self._groups = self._form()
        if not self._inputs:
            return self._groups
        inputs = _Group(frozenset())
        inputs.parameters += [
            value for ref in self._inputs.values() if (value := ref()) is not None
        ]
        return [*self._groups, inputs]

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
        formed: dict[frozenset[int], _Group] = {}
        for key, parameter in parameters.items():
            owned = frozenset(owners.get(key, ()))
            formed.setdefault(owned, _Group(owned)).parameters.append(parameter)
        return list(formed.values())
