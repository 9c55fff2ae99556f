"""Captures training calls of roots, so that they can be repeated with and without a lever."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from fasttrain.shim.hooks.containers import map_tensors, tensors_in
from fasttrain.shim.hooks.device_clock import module_of
from fasttrain.shim.hooks.roots import Root, first_parameter

MOST_CALLS = 4  # of one root; a step of a GAN calls its critic two or three times
States = list[tuple[Callable[[Any], Any], Any]]  # what sets a random state, and the state


class CapturedCall:
    """One training call of a root: its arguments and random states, and what backward gave it.

    Made before the call; `watch` is for after it.

    Args:
        module: The root.
        args: Its positional arguments, of which copies are kept.
        kwargs: Its keyword arguments.

    Attributes:
        module: A weak reference to the root.
        args: Copies of the positional arguments, which require gradients as the arguments did.
        kwargs: The same of the keyword arguments.
        training: Whether each of its modules was in training mode.
        states: The states of torch's generators on the CPU and on the root's device.
        autocasts: The device and dtype of each autocast of the script around the call.
        outputs: Tensors in its output.
        gradients: The gradient of each tensor in its output, summed over all backward passes; None
            for one that got none.
    """

    def __init__(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module = weakref.ref(module)
        copied: dict[int, Tensor] = {}
        self.args = map_tensors(args, functools.partial(_copy, copied))
        self.kwargs = map_tensors(kwargs, functools.partial(_copy, copied))
        self.training = [part.training for part in Module.modules(module)]
        self.states = torch_states(module)
        self.autocasts = _autocasts(module)
        self.outputs = 0
        self.gradients: list[Tensor | None] = []
        self._handles: list[RemovableHandle] = []
        self._given = {id(tensor) for tensor in tensors_in((args, kwargs))}

    def watch(self, output: Any) -> None:
        """Keep the gradients that backward passes compute for the call's output."""
        tensors = tensors_in(output)
        self.outputs, self.gradients = len(tensors), [None] * len(tensors)
        seen = set(self._given)  # an argument's gradient has parts from outside of the call
        for at, tensor in enumerate(tensors):
            if tensor.grad_fn is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                hook: Any = tensor.register_hook
                self._handles.append(hook(functools.partial(self._note, at)))

    def close(self) -> None:
        """Remove the hooks on the output."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def complete(self) -> bool:
        """True if a gradient reached the output."""
        return any(gradient is not None for gradient in self.gradients)

    def _note(self, at: int, gradient: Tensor) -> None:
        before, now = self.gradients[at], gradient.detach()
        self.gradients[at] = now.clone() if before is None else before + now


class RootListeners(Protocol):
    """The part of `RootCalls` that a capture needs.

    Attributes:
        on_call: Called before every call of a root with its positional and keyword arguments.
        on_return: Called after every call of a root with its output.
    """

    on_call: list[Callable[[Root, tuple[Any, ...], dict[str, Any]], None]]
    on_return: list[Callable[[Root, Any], None]]


class Capture:
    """Captures the training calls between two step boundaries.

    A call counts if its module is in training mode and gradients are recorded, and outside of
    torch.func's transforms, whose tensors are of no use after them.

    Args:
        roots: Routes the calls of roots.
        undo: Gets the removal of listeners and hooks.
    """

    def __init__(self, roots: RootListeners, undo: ExitStack) -> None:
        self._calls: defaultdict[int, list[CapturedCall]] = defaultdict(list)
        self._running: dict[int, CapturedCall] = {}  # by root
        roots.on_call.append(self._called)
        undo.callback(roots.on_call.remove, self._called)
        roots.on_return.append(self._returned)
        undo.callback(roots.on_return.remove, self._returned)
        undo.callback(self._close)

    def calls(self) -> list[CapturedCall]:
        """Return the calls whose output got a gradient, in the order of roots' first calls."""
        return [call for calls in self._calls.values() for call in calls if call.complete]

    def _called(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running.pop(id(root), None)  # of a call that raised
        module = root.ref()
        trains = module is not None and module.training and torch.is_grad_enabled()
        trains = trains and torch._C._functorch.peek_interpreter_stack() is None
        if module is not None and trains and len(self._calls[id(root)]) < MOST_CALLS:
            self._running[id(root)] = CapturedCall(module, args, kwargs)

    def _returned(self, root: Root, output: Any) -> None:
        call = self._running.pop(id(root), None)
        if call is not None:
            call.watch(output)
            self._calls[id(root)].append(call)

    def _close(self) -> None:
        for calls in self._calls.values():
            for call in calls:
                call.close()


def _copy(copied: dict[int, Tensor], tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, the same one for the same tensor."""
    if id(tensor) not in copied:
        with torch.no_grad():
            copied[id(tensor)] = tensor.detach().clone()
        copied[id(tensor)].requires_grad_(tensor.requires_grad)
    return copied[id(tensor)]


def torch_states(module: Module) -> States:
    """Return the states of torch's generators on the CPU and on a module's device."""
    generators: list[Any] = [torch.default_generator]
    parameter = first_parameter(module)
    if parameter is not None:
        vendor = module_of(parameter.device)
        of_devices = getattr(vendor, "default_generators", ())
        if of_devices:
            generators.append(of_devices[parameter.device.index or 0])
    return [(generator.set_state, generator.get_state()) for generator in generators]


def _autocasts(module: Module) -> list[tuple[str, torch.dtype]]:
    parameter = first_parameter(module)
    devices = {"cpu", "cpu" if parameter is None else parameter.device.type}
    on = [device for device in sorted(devices) if torch.is_autocast_enabled(device)]
    return [(device, torch.get_autocast_dtype(device)) for device in on]
