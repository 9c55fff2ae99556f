"""Makes a fused optimizer of torch_npu keep the contract of torch.optim.

torch_npu's fused optimizers move all parameters, gradients and state into flat buffers at their
first step, and use nothing else from then on. Without an error they miss gradients that were set to
None, parameters that were moved and checkpoints that were loaded. So here the fused optimizer is a
second one next to the script's. It has gradients of its own, which the script's are copied into. It
shares the memory of the parameters and the state, and this is checked before each step.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from fasttrain.shim.levers.npu_optimizer.counterparts import Counterpart

OTHER_GRADIENTS = "other parameters than before had a gradient"

_gradient: Callable[[Tensor], Tensor | None] = attrgetter("grad")
_is_sparse: Callable[[Any], bool] = attrgetter("is_sparse")
_shape: Callable[[Tensor], Any] = attrgetter("shape")


class Links:
    """The parameters and state that the fused optimizer shares with the script's.

    They are checked for each parameter before every step, so the checks have to be quick: `map`
    runs each of them over all parameters. For Adam with 300 parameters this takes 0.15 ms, and a
    written loop 0.34 ms (torch 2.13, one core of a 2-core machine).

    Args:
        optimizer: The script's, whose state is in views of the flat buffers already.
        linked: Its parameters that are in the flat buffers: those that have a gradient.
    """

    def __init__(self, optimizer: Optimizer, linked: list[Tensor]) -> None:
        self._params = [list(group["params"]) for group in optimizer.param_groups]
        taken = set(map(id, linked))
        self._linked = linked
        self._others = [p for p in chain.from_iterable(self._params) if id(p) not in taken]
        self._addresses = list(map(Tensor.data_ptr, linked))
        self._shapes = list(map(_shape, linked))
        self._states: list[Any] = list(optimizer.state.values())
        self._gradients: list[Any] = []
        self.hold()

    def hold(self) -> None:
        """Note what the state holds now, as what it must hold at the next check."""
        self._values = _values(self._states)

    def gradients(self) -> list[Any]:
        """Return the gradients of the linked parameters, those that `misfit` has read if any."""
        found, self._gradients = self._gradients, []  # else they would outlive the step
        return found or list(map(_gradient, self._linked))

    def misfit(self, optimizer: Optimizer) -> str:
        """Return what the script has changed since; empty if nothing."""
        groups = optimizer.param_groups
        if len(groups) != len(self._params) or not all(
            _same(group["params"], known) for group, known in zip(groups, self._params, strict=True)
        ):
            return "its parameter groups were changed"
        return self._moved() or self._replaced(optimizer.state)

    def _moved(self) -> str:
        gradients = list(map(_gradient, self._linked))
        others = map(_gradient, self._others)
        if _holds_none(gradients) or any(gradient is not None for gradient in others):
            return OTHER_GRADIENTS
        if (
            list(map(Tensor.data_ptr, self._linked)) != self._addresses
            or list(map(_shape, self._linked)) != self._shapes
            or not all(map(Tensor.is_contiguous, self._linked))
        ):
            return "a parameter was moved"
        if any(map(_is_sparse, gradients)):
            return "a gradient was sparse"
        self._gradients = gradients
        return ""

    def _replaced(self, state: Any) -> str:
        # Entries that were added since belong to parameters that are not linked.
        found = list(state.values())[: len(self._states)]
        fits = _same(found, self._states) and _same(_values(found), self._values)
        return "" if fits else "its state was replaced"


class Counters:
    """The step counters of the script's optimizer, one for each parameter.

    In torch's optimizers a counter is a tensor, and adding to 300 of them takes longer than the
    fused step itself. So they become views of one tensor.

    Args:
        states: The optimizer's state of each parameter.
    """

    def __init__(self, states: list[dict[str, Any]]) -> None:
        self._whole = [state for state in states if isinstance(state.get("step"), int)]
        alike: dict[Any, list[Tensor]] = {}
        for step in [state.get("step") for state in states]:
            if isinstance(step, Tensor):
                alike.setdefault((step.dtype, step.device, step.shape), []).append(step)
        self._flats = [torch.stack(steps) for steps in alike.values()]
        self._expected = [flat.clone() for flat in self._flats]
        for flat, steps in zip(self._flats, alike.values(), strict=True):
            for view, step in zip(flat, steps, strict=True):
                step.set_(view)

    def advance(self) -> bool:
        """Count one step; return whether that has written to the state dictionaries."""
        for flat in (*self._flats, *self._expected):
            flat.add_(1)
        for state in self._whole:
            state["step"] += 1
        return bool(self._whole)

    def misfit(self) -> str:
        """Return that the script has set a counter; empty if it hasn't."""
        fits = all(map(torch.equal, self._flats, self._expected))
        return "" if fits else "its steps were set"


def _same(found: list[Any], known: list[Any]) -> bool:
    """True if two lists hold the same objects; ``==`` would compare tensors element by element."""
    return len(found) == len(known) and all(map(is_, found, known))


def _holds_none(values: Iterable[Any]) -> bool:
    return type(None) in set(map(type, values))


def _values(states: list[Any]) -> list[Any]:
    return list(chain.from_iterable([state.values() for state in states]))


# Flat buffers, each with weak references to the storages that are views of it.
_kept: list[tuple[list[Tensor], list[Any]]] = []


class Shadow:
    """The fused optimizer's copy of one parameter.

    Attributes:
        parameter: The script's parameter.
        tensor: The fused optimizer's tensor of the same memory, with a gradient of its own; None
            for a parameter without a gradient, which is in no flat buffer.
        state: The script's optimizer's state of the parameter.
    """

    __slots__ = ("parameter", "state", "tensor")

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.tensor: Tensor | None = None
        self.state: dict[str, Any] = {}
        if parameter.grad is not None:
            self.tensor = parameter.detach()
            self.tensor.grad = torch.zeros_like(self.tensor)

    def link(self, state: dict[str, Any], fused_state: dict[str, Any], names: Any) -> None:
        """Put views of the flat buffers into the state of the script's optimizer."""
        self.state = state
        state.update((key, fused_state[name]) for key, name in names if name in fused_state)


class Twin:
    """The fused optimizer, which shares the parameters and state of the script's own.

    Args:
        optimizer: The script's, between two steps; `unready` must be False for it.
        counterpart: Describes the fused optimizer.
        kind: The fused class.
    """

    def __init__(self, optimizer: Optimizer, counterpart: Counterpart, kind: Any) -> None:
        self.steps = 0
        self._counterpart = counterpart
        self._groups = [[Shadow(p) for p in group["params"]] for group in optimizer.param_groups]
        self._shadows = [s for shadows in self._groups for s in shadows if s.tensor is not None]
        self._shape = self._shape_of_state(optimizer)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch_npu still uses calls that torch deprecates
            self._fused = self._make(optimizer, kind)
            self._combine()
        self._fused_step = _unhooked(kind.step)
        self._slots: list[Any] = [s.tensor.grad for s in self._shadows if s.tensor is not None]
        self._link(optimizer)

    def _make(self, optimizer: Optimizer, kind: Any) -> Any:
        groups = []
        for group, shadows in zip(optimizer.param_groups, self._groups, strict=True):
            tensors = [s.tensor for s in shadows if s.tensor is not None]
            settings = {name: group[name] for name in self._counterpart.arguments}
            groups.append({**settings, "params": tensors})
        fused = kind(groups, lr=0.0, **self._counterpart.constants)
        for shadow in self._shadows:
            if state := optimizer.state.get(shadow.parameter):
                fused.state[shadow.tensor] = self._as_fused(state)
        return fused

    def _as_fused(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a parameter's state as the fused optimizer takes it: its step is an int."""
        names = self._counterpart.buffers.items()
        found = {name: state[key] for key, name in names if state.get(key) is not None}
        return {"step": int(state["step"]), **found} if "step" in state else found

    def _combine(self) -> None:
        fused = self._fused
        try:
            fused._maybe_init_combined_params_and_grads()
            fused._maybe_init_combined_states()
        finally:
            self._keep_alive()

    def _keep_alive(self) -> None:
        """Keep the flat buffers alive as long as a view of one exists.

        On a card a view is a bare pointer. The parameters, the state and what else shares their
        memory outlive this object. The gradients are its own, and end with it.
        """
        fused = self._fused
        flats = [*fused.params_all_group_combined]
        views = [s.tensor for s in self._shadows]
        for states in fused.combined_param_states_indexed_by_group or ():
            flats += [value for state in states or () for value in state.values()]
        for state in fused.state.values():
            views += [value for value in state.values() if isinstance(value, Tensor)]
        _keep([flat for flat in flats if isinstance(flat, Tensor)], views)

    def _link(self, optimizer: Optimizer) -> None:
        names = list(self._counterpart.buffers.items())
        states = optimizer.state
        for shadow in self._shadows:
            state = states.get(shadow.parameter, {})  # without momentum SGD has none
            shadow.link(state, self._fused.state.get(shadow.tensor, {}), names)
        self._counters = Counters([shadow.state for shadow in self._shadows])
        self._links = Links(optimizer, [shadow.parameter for shadow in self._shadows])

    def _settings(self, group: dict[str, Any], shadows: list[Shadow]) -> dict[str, Any]:
        """Return the present hyperparameters of one group."""
        settings = {name: group[name] for name in self._counterpart.arguments}
        schedule = self._counterpart.schedule
        if schedule and (shadow := next((s for s in shadows if s.tensor is not None), None)):
            settings["lr"] *= group[schedule].get_lr(shadow.state["step"])
        return settings

    def _shape_of_state(self, optimizer: Optimizer) -> list[Any]:
        return [self._counterpart.present(group) for group in optimizer.param_groups]

    def misfit(self, optimizer: Optimizer) -> str:
        """Return why it no longer matches the script's optimizer; empty if it does."""
        if self._shape_of_state(optimizer) != self._shape:
            return "its parameter groups were changed"
        return self._links.misfit(optimizer) or self._counters.misfit()

    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> None:
        """Make one step with the script's present gradients and hyperparameters."""
        torch._foreach_copy_(self._slots, self._links.gradients())
        groups = zip(optimizer.param_groups, self._groups, strict=True)
        for fused, (group, shadows) in zip(self._fused.param_groups, groups, strict=True):
            fused.update(self._settings(group, shadows))
        self._fused_step(self._fused)
        written = self._counters.advance()
        if self._counterpart.records:
            self._record()
            written = True
        if written:
            self._links.hold()
        self.steps += 1

    def _record(self) -> None:
        """Write a step's norms into the state, as the script's Lamb does; torch_npu has squares."""
        fused, states = self._fused, {id(s.tensor): s.state for s in self._shadows}
        for group, by_dtype in enumerate(fused.params_lists_indexed_by_group):
            for dtype, tensors in enumerate(by_dtype):
                weights = fused.param_pow_lists_indexed_by_group[group][dtype]
                steps = fused.adam_step_pow_lists_indexed_by_group[group][dtype]
                ratios = fused.trust_ratio_lists_indexed_by_group[group][dtype]
                for tensor, weight, step, ratio in zip(
                    tensors, weights, steps, ratios, strict=True
                ):
                    norms = weight.sum().sqrt().clamp(0, 10), step.sum().sqrt()
                    written = (*norms, ratio.flatten()[0].clone())
                    names = self._counterpart.records
                    states[id(tensor)].update(zip(names, written, strict=True))


def unready(optimizer: Optimizer, counterpart: Counterpart) -> bool:
    """True if the script's optimizer has to make its own step first, which creates its state."""
    for group in optimizer.param_groups:
        keys = counterpart.present(group)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter) or {}
            if parameter.grad is not None and any(state.get(key) is None for key in keys):
                return True
    return False


def uneven(optimizer: Optimizer, counterpart: Counterpart) -> str:
    """Return what in the optimizer's state the fused one can't keep; empty if nothing."""
    for group in optimizer.param_groups:
        steps = set()
        for parameter in group["params"]:
            if parameter.grad is None or not (state := optimizer.state.get(parameter)):
                continue
            for key in state:
                if key not in ("step", *counterpart.buffers, *counterpart.records):
                    return f"{counterpart.fused} does not keep its {key}, which checkpoints hold"
            steps.add(int(state.get("step", 0)))
        if len(steps) > 1:
            return "its parameters have made different numbers of steps"
    return ""


def _unhooked(step: Any) -> Any:
    """Return a class's step without torch's hooks: those of the script's optimizer run already."""
    return inspect.unwrap(step, stop=lambda f: not getattr(f, "hooked", False))


def _keep(flats: list[Tensor], views: list[Any]) -> None:
    _kept[:] = [(f, refs) for f, refs in _kept if not all(ref.expired() for ref in refs)]
    reference: Any = StorageWeakRef
    refs = [reference(view.untyped_storage()) for view in views]
    _kept.append((flats, refs))
