"""Repeats a captured call at a step boundary, and leaves everything as it was."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad as gradients_of  # before a lever replaces it
from torch.nn import Module, Parameter

from fasttrain.shim.data_parallel.random_streams import alike
from fasttrain.shim.data_parallel.split.surroundings import Silence, other_random_states
from fasttrain.shim.hooks.containers import map_tensors, tensors_in
from fasttrain.shim.hooks.roots import first_parameter, parameters_of
from fasttrain.shim.tune.captured import CapturedCall, States, torch_states
from fasttrain.shim.tune.distances import VALUE, Results, Tensors, dense, other_bits, same_bits
from fasttrain.shim.tune.double import InDouble, Rounded, SameDraws
from fasttrain.shim.tune.double_weights import DoubleWeights, widened
from fasttrain.shim.tune.inner_calls import RepetitionError

Around = Callable[[], AbstractContextManager[Any]]
Cast = Callable[[Tensor], Tensor]
Pairs = Sequence[tuple[Parameter, Parameter]]
_CONTAINERS = (list, dict, deque, OrderedDict)
TF32 = 2.0**-8  # products on accelerators may have 10 bits
_LEVERS_OWN = "_compiled_call_impl"  # a lever that fills this slot of a module empties it itself


@dataclass(frozen=True, slots=True)
class Repetition:
    """One repetition of a call.

    Attributes:
        results: What it came to.
        drew: Whether it drew random numbers.
        states: The states of torch's generators after it.
    """

    results: Results
    drew: bool
    states: States

    def same_draws(self, other: Repetition) -> bool:
        """True if another repetition leaves the same random states."""
        return _alike(self.states, other.states)

    def other_bits(self, other: Repetition) -> str:
        """Return the first part whose bits are others in another repetition; empty if none is."""
        if where := other_bits(self.results, other.results):
            return where
        return "" if self.same_draws(other) else "the random state after it"


class Repeater:
    """Repeats one captured call on its module, as often as is asked for.

    Each repetition begins with the random states of the captured call, and with the parameters,
    buffers and attributes that the modules had when this was made, which are restored after it.

    Args:
        captured: The call.
        module: Its root.

    Raises:
        RepetitionError: If the modules are others than in the captured call.
    """

    def __init__(self, captured: CapturedCall, module: Module) -> None:
        if len(captured.training) != len(list(Module.modules(module))):
            raise RepetitionError("it has other modules than when it was called")
        self._captured, self._module = captured, module
        self._double = DoubleWeights(module)
        self._names = {id(p): name for name, p in Module.named_parameters(module)}
        self._state = _State(module)
        parameter = first_parameter(module)
        self._dtype = torch.float32 if parameter is None else parameter.dtype
        self._device = torch.device("cpu") if parameter is None else parameter.device

    @property
    def coarseness(self) -> float:
        """How far from fp64 a plain call may be at least: what it computes in isn't always fp32."""
        if self._dtype is not torch.float32 or self._captured.autocasts:
            return math.inf
        return 0.0 if self._device.type == "cpu" else TF32

    def repeat(self, around: Around, *, eager: bool = False) -> Repetition:
        """Make the call, and restore the module.

        Args:
            around: Returns the context of the call and its backward pass.
            eager: Have random numbers drawn in the parameters' dtype, whatever computes with them.
                Only operators that run eagerly can be made to.

        Raises:
            RepetitionError: If the results aren't like those of the captured call.
        """
        with self._restored(self._restore_parameters), ExitStack() as stack:
            for device, dtype in self._captured.autocasts:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            stack.enter_context(around())
            mode = SameDraws(self._dtype) if eager else nullcontext()
            found = self._call(lambda tensor: tensor, lambda _: mode)
            return self._with_parameters(found, self._double.pairs())

    def in_double(self, around: Around, rounding: float = 0.0, seed: int = 0) -> Repetition:
        """Make the call in fp64, with copies of parameters and buffers, and restore the module.

        Args:
            around: Returns the context of a plain call.
            rounding: Largest relative error of each result; by default they are exact.
            seed: Which errors.
        """

        def mode(arguments: Iterable[Tensor]) -> Any:
            if not rounding:
                return InDouble(self._dtype)
            weights = [p for pair in self._double.pairs() for p in pair]
            return Rounded(self._dtype, rounding, [*weights, *arguments], seed)

        with self._restored(self._restore_copies), self._double.in_place(), around():
            found = self._call(widened, mode)
            return self._with_parameters(found, [(c, p) for p, c in self._double.pairs()])

    @contextmanager
    def _restored(self, restore_weights: Callable[[], None]) -> Iterator[None]:
        """Have the module as in the captured call, and restore it after the block."""
        with ExitStack() as stack:
            stack.callback(restore_weights)
            stack.enter_context(self._state.restored())
            stack.enter_context(_without_hooks(list(parameters_of(self._module))))
            parts = Module.modules(self._module)
            for part, training in zip(parts, self._captured.training, strict=True):
                part.training = training
            yield

    def _call(self, cast: Cast, mode: Callable[[Iterable[Tensor]], Any]) -> Repetition:
        captured, module = self._captured, self._module
        leaves = _Leaves(cast)
        args, kwargs = map_tensors((captured.args, captured.kwargs), leaves.of)
        for put, state in captured.states:
            put(state)
        states = torch_states(module)
        buffers = _buffers(module)
        with Silence(), torch.enable_grad():
            # A compiled `weight.data = ...` sets the parameter to other memory behind its graph,
            # where `set_` gives it a new edge: gradients arrive at the one that it had before.
            edges = {n: _edge(p) for n, p in _trained(module).items()}
            with mode(leaves.all()):
                output = module(*args, **kwargs)
                gradients, of_arguments = self._pulled_back(output, leaves.differentiable(), edges)
        groups: dict[str, Tensors] = {
            "output": {str(i): _detached(t) for i, t in enumerate(tensors_in(output))},
            "gradient of": gradients,
            "gradient of argument": of_arguments,
            "buffer": _buffers(module),
        }
        after = torch_states(module)
        return Repetition(Results(groups, {"buffer": buffers}), not _alike(states, after), after)

    def _pulled_back(
        self, output: Any, arguments: dict[str, Tensor], edges: dict[str, Any]
    ) -> tuple[Tensors, Tensors]:
        """Return the gradients that the script's gradient of the output leads to."""
        tensors, given = tensors_in(output), self._captured.gradients
        if len(tensors) != len(given):
            raise RepetitionError(f"it returns {len(tensors)} tensors instead of {len(given)}")
        pairs = [(t, g) for t, g in zip(tensors, given, strict=True) if g is not None]
        if any(t.shape != g.shape for t, g in pairs):
            raise RepetitionError("it returns tensors of other shapes")
        if not all(t.requires_grad for t, _ in pairs):
            raise RepetitionError("it returns a tensor without a gradient")
        named = _trained(self._module)
        # What keeps a parameter by itself uses it, although its copy is in its place.
        behind = {n: q for n, p in named.items() if (q := self._double.behind(p)) is not None}
        left = {n: edge for n, edge in edges.items() if n in named and _moved(edge, named[n])}
        of: Any = [*named.values(), *arguments.values(), *behind.values(), *left.values()]
        seeds = [g.to(t.dtype) for t, g in pairs]
        found: Sequence[Tensor | None] = gradients_of(
            [t for t, _ in pairs], of, seeds, allow_unused=True
        )
        strided = iter([g if g is None else dense(g.detach()) for g in found])
        gradients, of_arguments, *parts = (
            {name: next(strided) for name in group} for group in (named, arguments, behind, left)
        )
        for part in parts:
            gradients.update({n: _sum(gradients[n], gradient) for n, gradient in part.items()})
        return gradients, of_arguments

    def _with_parameters(self, found: Repetition, pairs: Pairs) -> Repetition:
        """Add the parameters that the call has changed, as ``Embedding(max_norm=1)`` does.

        Args:
            found: The repetition so far.
            pairs: Each parameter that the call used with the one that has its value before.
        """
        names = [self._names[id(original)] for original, _ in self._double.pairs()]
        used = dict(zip(names, (parameter for parameter, _ in pairs), strict=True))
        before = dict(zip(names, (other.detach() for _, other in pairs), strict=True))
        changed = {
            name: _detached(parameter)
            for name, parameter in used.items()
            if not same_bits(parameter, _like(parameter, before[name]))
        }
        of = found.results
        results = Results({**of.groups, VALUE: changed}, {**of.before, VALUE: before})
        return replace(found, results=results)

    def _restore_parameters(self) -> None:
        _restore(self._double.pairs())

    def _restore_copies(self) -> None:
        _restore([(copied, p) for p, copied in self._double.pairs()])


@torch.no_grad()
def _restore(pairs: Pairs) -> None:
    """Set parameters that a call has changed to the values that they had before."""
    for parameter, before in pairs:
        value = _like(parameter, before)
        if not same_bits(parameter, value):
            parameter.copy_(value)


def _like(parameter: Tensor, other: Tensor) -> Tensor:
    return other.detach().to(parameter.dtype)


class _Leaves:
    """Copies of arguments for one repetition, which take gradients as the arguments did."""

    def __init__(self, cast: Cast) -> None:
        self._cast = cast
        self._made: dict[int, Tensor] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return the copy of an argument."""
        if id(tensor) not in self._made:
            copied = self._cast(tensor.detach()).clone()
            self._made[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
        return self._made[id(tensor)]

    def all(self) -> Iterable[Tensor]:
        """Return all copies."""
        return self._made.values()

    def differentiable(self) -> dict[str, Tensor]:
        """Return the copies that take gradients, by place."""
        return {str(i): t for i, t in enumerate(self._made.values()) if t.requires_grad}


class _State:
    """What repetitions of a call may change in its modules and in random states."""

    def __init__(self, module: Module) -> None:
        self._parts = [(part, dict(vars(part))) for part in Module.modules(module)]
        held = [value for _, attributes in self._parts for value in attributes.values()]
        self._contents = [(v, copy.copy(v)) for v in held if type(v) in _CONTAINERS]
        found = [*Module.buffers(module), *(t for v in held for t in tensors_in(v))]
        tensors = {id(t): t for t in found if not isinstance(t, Parameter)}
        self._tensors = [(t, _detached(t)) for t in tensors.values()]
        self._parameters = [(p, p.grad, p.requires_grad) for p in parameters_of(module)]
        self._random = [*torch_states(module), *other_random_states()]

    @contextmanager
    def restored(self) -> Iterator[None]:
        try:
            yield
        finally:
            for part, before in self._parts:
                _put(vars(part), before)
            for held, before in self._contents:
                _put_contents(held, before)
            for parameter, gradient, requires_grad in self._parameters:
                parameter.requires_grad_(requires_grad)
                parameter.grad = gradient
            self._put_tensors()
            for put, state in self._random:
                put(state)

    @torch.no_grad()
    def _put_tensors(self) -> None:
        # Only changed ones: a copy raises the version, and graphs of earlier calls may need them.
        for tensor, value in self._tensors:
            if not same_bits(tensor, value):
                tensor.copy_(value)


def _put(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    for name in attributes.keys() - before.keys() - {_LEVERS_OWN}:
        del attributes[name]
    attributes.update({name: v for name, v in before.items() if name != _LEVERS_OWN})


def _put_contents(held: Any, before: Any) -> None:
    if isinstance(held, dict):
        now, then = list(held.items()), list(before.items())
        same = len(now) == len(then) and all(
            a == b and one is other for (a, one), (b, other) in zip(now, then, strict=True)
        )
    else:
        same = len(held) == len(before) and all(
            one is other for one, other in zip(held, before, strict=True)
        )
    if not same:
        held.clear()
        (held.update if isinstance(held, dict) else held.extend)(before)


def _alike(one: States, other: States) -> bool:
    return all(alike(a, b) for (_, a), (_, b) in zip(one, other, strict=True))


def _trained(module: Module) -> dict[str, Parameter]:
    return {n: p for n, p in Module.named_parameters(module) if p.requires_grad}


def _edge(parameter: Parameter) -> Any:
    """Return where the gradient of a parameter arrives; None before torch 2.2, which can't."""
    edge_of = getattr(torch.autograd.graph, "get_gradient_edge", None)
    return None if edge_of is None else edge_of(parameter)


def _moved(edge: Any, parameter: Parameter) -> bool:
    """True if the gradient of a parameter arrives elsewhere by now."""
    return edge is not None and edge.node is not _edge(parameter).node


def _buffers(module: Module) -> dict[str, Tensor]:
    return {name: _detached(buffer) for name, buffer in Module.named_buffers(module)}


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


@contextmanager
def _without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Take the hooks off leaves in the block: these gradients aren't those of a step."""
    held: list[tuple[Any, dict[int, Any]]] = [
        (t._backward_hooks, dict(t._backward_hooks)) for t in tensors if t._backward_hooks
    ]
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in held:
            hooks.clear()
            hooks.update(before)
