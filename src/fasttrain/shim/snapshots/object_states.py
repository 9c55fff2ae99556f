"""Saves and restores the state of modules, optimizers, schedulers and scalers.

State is restored into the objects that the script has created; none is replaced. State that doesn't
fit is refused as a whole: a run never gets half of another script's snapshot.
"""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fasttrain.model.vendors import LIKE_CUDA
from fasttrain.shim.data_parallel.random_streams import RandomStreams, alike
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.seams import Training, then
from fasttrain.shim.process.import_hook import after_import
from fasttrain.shim.snapshots.files import NeedsPickleError, packed, refuse_mismatch
from fasttrain.shim.snapshots.generators import of_python, to_python
from fasttrain.shim.snapshots.script_tensors import merged

# The states of all random number generators that a training loop draws from.


class RandomStates:
    """The states of torch, NumPy and Python, and a rank's streams if there are several ranks."""

    def __init__(self, streams: RandomStreams | None) -> None:
        self._streams = streams

    def capture(self) -> dict[str, Any]:
        """Return all states."""
        numpy = sys.modules.get("numpy.random")
        return {
            "torch": torch.default_generator.get_state(),
            "accelerator": {kind: module.get_rng_state_all() for kind, module in _accelerators()},
            "python": of_python(random.getstate()),
            "numpy": numpy.get_state() if numpy else None,
            "streams": self._streams.state() if self._streams else None,
        }

    @property
    def of_several(self) -> bool:
        """True if there are several ranks, each with its own streams."""
        return self._streams is not None

    def of_order(self) -> AbstractContextManager[Any]:
        """Return a context in which random numbers come from the stream that all ranks share."""
        return self._streams.shared() if self._streams else nullcontext()

    def restore(self, states: dict[str, Any]) -> None:
        """Restore all states; NumPy's as soon as it is imported."""
        torch.default_generator.set_state(states["torch"])
        for kind, of_devices in states["accelerator"].items():
            getattr(torch, kind).set_rng_state_all(of_devices)
        random.setstate(to_python(states["python"]))
        if states["numpy"] is not None:
            after_import("numpy.random", lambda module: module.set_state(states["numpy"]))
        if self._streams and states["streams"] is not None:
            self._streams.restore(states["streams"])


def _accelerators() -> Iterator[tuple[str, Any]]:
    """Yield torch's modules of the accelerators in use, which all have the same functions."""
    for kind in LIKE_CUDA:
        module = getattr(torch, kind, None)
        if module is not None and module.is_initialized():
            yield kind, module


def same(states: dict[str, Any], others: dict[str, Any]) -> bool:
    """True if nothing was drawn between two captures."""
    names = ("torch", "accelerator", "python", "numpy")
    return all(alike(states[name], others[name]) for name in names)


# Saves and restores the state of modules, optimizers, schedulers and scalers.


# Attributes that torch itself gives to every module or optimizer; all others are the script's.
_TORCHS = frozenset(vars(Module())) | frozenset(vars(Optimizer([torch.empty(0)], {})))


def plain_attributes(owner: Module | Optimizer) -> dict[str, Any]:
    """Return the script's attributes that hold numbers, strings, tensors or containers of them."""
    return {name: value for name, value in own_attributes(owner) if _is_plain(value)}


def other_attributes(owner: Module | Optimizer) -> Iterator[tuple[str, Any]]:
    """Return the script's other attributes with their names: objects that may hold tensors."""
    return ((name, value) for name, value in own_attributes(owner) if not _is_plain(value))


def set_attributes(owner: Module | Optimizer, saved: dict[str, Any]) -> None:
    """Restore `plain_attributes`, tensors in place: an optimizer may train one of them."""
    for name, value in saved.items():
        vars(owner)[name] = merged(vars(owner).get(name), value)


def own_attributes(owner: Module | Optimizer) -> Iterator[tuple[str, Any]]:
    """Return the script's attributes with their names."""
    return ((name, value) for name, value in vars(owner).items() if name not in _TORCHS)


def _is_plain(value: Any) -> bool:
    try:
        packed(value)
    except NeedsPickleError:
        return False
    return not _holds_parameter(value)


def _holds_parameter(value: Any) -> bool:
    """True if it contains a parameter, which is saved with its module."""
    if isinstance(value, dict):
        return any(map(_holds_parameter, value.values()))
    if isinstance(value, list | tuple | deque):
        return any(map(_holds_parameter, value))
    return isinstance(value, Parameter)


_MODULES_OWN = frozenset(vars(Module()))  # attributes that every module has


class Registry:
    """Weak references to the modules, optimizers, schedulers and scalers of this process.

    Their order of creation identifies them from one run to the next.
    """

    def __init__(self) -> None:
        self._made: dict[str, list[weakref.ref[Any]]] = {}

    def install(self, undo: ExitStack) -> None:
        """Track the creation of such objects; a deep copy of a module counts, too."""
        patching.wrap(Module, "__init__", self._following("modules"), undo)
        patching.wrap(Module, "__setstate__", self._following("modules"), undo)
        schedulers = self._following("schedulers")
        patching.wrap(LRScheduler, "__init__", schedulers, undo)
        if not issubclass(ReduceLROnPlateau, LRScheduler):  # up to torch 2.1
            patching.wrap(ReduceLROnPlateau, "__init__", schedulers, undo)
        for owner, kind in ((Optimizer, "optimizers"), (GradScaler, "scalers")):
            patching.wrap(owner, "__init__", self._following(kind), undo, Training.SNAPSHOTS)

    def _following(self, kind: str) -> patching.Make:
        made = self._made.setdefault(kind, [])
        return then(lambda made_one: made.append(weakref.ref(made_one, made.remove)))

    def of(self, kind: str) -> list[Any]:
        """Return the living objects of a kind in order of creation, each once."""
        living = [one for ref in self._made[kind] if (one := ref()) is not None]
        return list({id(one): one for one in living}.values())

    def outermost(self) -> list[Module]:
        """Return the modules that are part of no other module, and hold a tensor."""
        gc.collect()  # a dead module in a reference cycle would be counted or not by chance
        # DDP wrappers that average gradients come and go with the number of ranks.
        modules = [m for m in self.of("modules") if not isinstance(m, DistributedDataParallel)]
        parts = {id(part) for module in modules for part in module._modules.values()}
        return [m for m in modules if id(m) not in parts and _holds_tensors(m)]


def _holds_tensors(module: Module) -> bool:
    """True if it may hold a tensor: some averages of weights are modules with only a dictionary."""
    for part in Module.modules(module):
        own = (value for name, value in vars(part).items() if name not in _MODULES_OWN)
        if part._parameters or part._buffers:
            return True
        if any(isinstance(value, Tensor | dict | list | deque) for value in own):
            return True
    return False


def shared_state(registry: Registry) -> dict[str, Any]:
    """Return the state that is equal on all ranks: weights, optimizers, schedulers, scalers."""
    modules = registry.outermost()
    known = {id(p) for module in modules for p in _parameters(module).values()}
    return {
        "modules": [_weights(module) for module in modules],
        "optimizers": [_optimizer(one, known) for one in registry.of("optimizers")],
        "schedulers": [_by_state_dict(one) for one in registry.of("schedulers")],
        "scalers": [_by_state_dict(one) for one in registry.of("scalers")],
    }


def own_state(registry: Registry) -> list[dict[str, Any]]:
    """Return the state that differs between ranks: buffers, and attributes of modules."""
    return [
        {
            "buffers": _buffers(module),
            "attributes": [plain_attributes(part) for part in Module.modules(module)],
        }
        for module in registry.outermost()
    ]


def other_objects(registry: Registry) -> Iterator[tuple[str, Any]]:
    """Yield the other attributes of modules and optimizers, with names for them."""
    parts = [part for module in registry.outermost() for part in Module.modules(module)]
    for number, owner in enumerate([*parts, *registry.of("optimizers")]):
        for name, value in other_attributes(owner):
            yield f"{_kind(owner)} {number}.{name}", value


def trained_parameters(registry: Registry) -> list[tuple[list[str], list[int]]]:
    """Return which parameters of each optimizer have a gradient or a state, by number.

    An optimizer is known by the shapes of its parameters: others may be gone before a replay comes
    to where they were.
    """
    found = []
    for optimizer in registry.of("optimizers"):
        parameters = _of_groups(optimizer)
        state = {id(p) for p, of_it in optimizer.state.items() if of_it}
        there = [n for n, p in enumerate(parameters) if p.grad is not None or id(p) in state]
        found.append((_shapes(parameters), there))
    return found


def untrained(optimizer: Optimizer, trained: list[tuple[list[str], list[int]]]) -> list[Tensor]:
    """Return the parameters that have no gradient now, and had none in the run before.

    Args:
        optimizer: An optimizer after its first real backward pass.
        trained: The result of `trained_parameters` for that run.
    """
    parameters = _of_groups(optimizer)
    shapes = _shapes(parameters)
    like = [set(numbers) for of_one, numbers in trained if of_one == shapes]
    if not like:
        return []
    known = set.union(*like)
    return [
        p for n, p in enumerate(parameters) if p.requires_grad and p.grad is None and n not in known
    ]


def release(registry: Registry) -> None:
    """Free what `restore` replaces, so that memory needn't hold both: a GPU may be nearly full."""
    for module in registry.outermost():
        _set_gradients(_parameters(module), {})
    for optimizer in registry.of("optimizers"):
        optimizer.state.clear()
        for parameter in _of_groups(optimizer):
            parameter.grad = None


def restore(registry: Registry, shared: dict[str, Any], own: list[dict[str, Any]]) -> None:
    """Restore both states.

    Raises:
        SystemExit: ``snapshot-mismatch`` if the script has created other objects.
    """
    modules = registry.outermost()
    _compare("modules", [_kind(m) for m in modules], [m["kind"] for m in shared["modules"]])
    for kind in ("optimizers", "schedulers", "scalers"):
        there = [_kind(one) for one in registry.of(kind)]
        _compare(kind, there, [one["kind"] for one in shared[kind]])
    with torch.no_grad():
        for module, saved, mine in zip(modules, shared["modules"], own, strict=True):
            _fill(_kind(module), _parameters(module), saved["parameters"])
            _fill(_kind(module), _buffers(module), mine["buffers"])
            _set_gradients(_parameters(module), saved["gradients"])
            for part, attributes in zip(Module.modules(module), mine["attributes"], strict=True):
                set_attributes(part, attributes)
        for one, saved in zip(registry.of("optimizers"), shared["optimizers"], strict=True):
            _set_optimizer(one, saved)
    for kind in ("schedulers", "scalers"):
        for one, saved in zip(registry.of(kind), shared[kind], strict=True):
            if saved["state"]:  # a disabled scaler has none
                one.load_state_dict(saved["state"])


def _kind(one: Any) -> str:
    return f"{type(one).__module__}.{type(one).__qualname__}"


def _compare(what: str, there: list[str], then: list[str]) -> None:
    if there != then:
        pairs = zip([*there, "none"], [*then, "none"], strict=False)
        here, before = next(pair for pair in pairs if pair[0] != pair[1])
        refuse_mismatch(f"among its {what} there is {here} where the snapshot has {before}")


def _by_state_dict(one: Any) -> dict[str, Any]:
    return {"kind": _kind(one), "state": one.state_dict()}


# --- modules


def _parameters(module: Module) -> dict[str, Tensor]:
    # Called on Module, as the script's class may override it.
    return dict(Module.named_parameters(module, remove_duplicate=False))


def _buffers(module: Module) -> dict[str, Tensor]:
    return dict(Module.named_buffers(module, remove_duplicate=False))


def _weights(module: Module) -> dict[str, Any]:
    parameters = _parameters(module)
    return {
        "kind": _kind(module),
        "parameters": {name: p.detach() for name, p in parameters.items()},
        "gradients": {name: p.grad for name, p in parameters.items() if p.grad is not None},
    }


def _fill(what: str, tensors: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    there = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors.items()]
    then = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in saved.items()]
    _compare(f"tensors of {what}", there, then)
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])


def _set_gradients(parameters: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.grad = saved.get(name)


# --- optimizers


def _of_groups(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _shapes(parameters: list[Tensor]) -> list[str]:
    return [str(tuple(p.shape)) for p in parameters]


def _optimizer(optimizer: Optimizer, known: set[int]) -> dict[str, Any]:
    parameters = _of_groups(optimizer)
    numbers = {id(p): number for number, p in enumerate(parameters)}
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    unowned = {n: p.detach() for n, p in enumerate(parameters) if id(p) not in known}
    return {
        "kind": _kind(optimizer),
        "shapes": _shapes(parameters),
        "groups": groups,
        # By number, not by state_dict(): load_state_dict() would cast state to the weights' dtype.
        "state": {numbers[id(p)]: dict(s) for p, s in optimizer.state.items() if id(p) in numbers},
        "attributes": plain_attributes(optimizer),
        "beside": {key: s for key, s in optimizer.state.items() if id(key) not in numbers},
        "unowned": unowned,
        "unowned gradients": {n: parameters[n].grad for n in unowned},
    }


def _set_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    parameters = _of_groups(optimizer)
    shapes = _shapes(parameters)
    _compare(f"parameters of {_kind(optimizer)}", shapes, saved["shapes"])
    for group, fields in zip(optimizer.param_groups, saved["groups"], strict=True):
        for name, value in fields.items():
            if isinstance(group.get(name), Tensor) and isinstance(value, Tensor):
                group[name].copy_(value)  # in place: a scheduler may refer to a learning rate
            else:
                group[name] = value
    optimizer.state.clear()
    for number, state in saved["state"].items():
        optimizer.state[parameters[number]] = state
    optimizer.state.update(saved["beside"])
    set_attributes(optimizer, saved["attributes"])
    for number, value in saved["unowned"].items():
        parameters[number].copy_(value)
        parameters[number].grad = saved["unowned gradients"][number]
