"""Finds the roots: the outermost modules with parameters that the script calls.

`torch.nn.Module.__call__` is replaced by a plain closure with the same number of frames. Inside a
root it does what torch's own does, behind one look at a thread-local flag (about 50 ns per module
on a 2-core CPU, torch 2.13); only the outermost call takes the long way, where levers act. Global
module hooks would see the same calls, but they send every module down torch's slow path, and a
root known by the optimizer's parameters would miss teachers, averaged copies and loops without
optimizers.

Source: ``torch/nn/modules/module.py`` of torch 2.13, ``Module._wrapped_call_impl``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Module, Parameter

from fasttrain.shim.callsite import call_site

Call = Callable[..., Any]
Region = Callable[["Root", Call, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(slots=True)
class Root:
    """One outermost module.

    Attributes:
        ref: The module, weakly.
        name: Its class.
        where: Where the script called it first.
        trainable: Whether any of its parameters wanted a gradient at its first call.
        calls: How often the script called it.
    """

    ref: weakref.ref[Module]
    name: str
    where: str
    trainable: bool
    calls: int = 0
    _parameter: weakref.ref[Parameter] = field(default=lambda: None, repr=False)  # type: ignore[assignment]

    def parameter(self) -> Parameter | None:
        """Give the first floating-point parameter, found anew when the module replaced it."""
        parameter = self._parameter()
        if parameter is None:
            module = self.ref()
            parameter = first_parameter(module) if module is not None else None
            if parameter is not None:
                self._parameter = weakref.ref(parameter)
        return parameter


class _Inside(threading.local):
    """Whether this thread is inside a root; each thread has a model call of its own."""

    flag = False


class RootCalls:
    """Every call of a root passes here; levers say what is to happen around it.

    Attributes:
        region: Runs the call itself, for the precision lever; None runs it plainly.
        on_discover: Called once for each new root, before its first call.
        on_call: Called before every call of a root with its positional and keyword arguments.
    """

    def __init__(self) -> None:
        self.region: Region | None = None
        self.on_discover: list[Callable[[Root, Module], None]] = []
        self.on_call: list[Callable[[Root, tuple[Any, ...], dict[str, Any]], None]] = []
        self.last: Root | None = None
        self._inside = _Inside()
        self._table: dict[int, Root] = {}

    def install(self, undo: ExitStack) -> None:
        """Route every module call through here until ``undo`` is closed."""
        inside, outermost = self._inside, self._outermost

        def __call__(self: Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if inside.flag:
                compiled = self._compiled_call_impl
                if compiled is not None:
                    return compiled(*args, **kwargs)
                return self._call_impl(*args, **kwargs)  # type: ignore[misc]
            return outermost(self, args, kwargs)

        original = Module.__call__
        Module.__call__ = __call__  # type: ignore[method-assign]
        undo.callback(setattr, Module, "__call__", original)

    def _outermost(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        root = self._root_of(module)
        call: Call = module._compiled_call_impl or module._call_impl
        if root is None:
            return call(*args, **kwargs)
        root.calls += 1
        self.last = root
        for listen in self.on_call:
            listen(root, args, kwargs)
        region = self.region
        self._inside.flag = True
        try:
            if region is None:
                return call(*args, **kwargs)
            return region(root, call, args, kwargs)
        finally:
            self._inside.flag = False

    def _root_of(self, module: Module) -> Root | None:
        root = self._table.get(id(module))
        if root is not None and root.ref() is module:
            return root
        if _being_traced() or _in_backward():
            return None
        parameter = first_parameter(module)
        return None if parameter is None else self._discover(module, parameter)

    def _discover(self, module: Module, parameter: Parameter) -> Root:
        key = id(module)
        root = Root(
            ref=weakref.ref(module, lambda _: self._table.pop(key, None)),
            name=type(module).__name__,
            where=call_site(),
            trainable=any(p.requires_grad for p in module.parameters()),
            _parameter=weakref.ref(parameter),
        )
        self._table[key] = root
        for listen in self.on_discover:
            listen(root, module)
        return root


def first_parameter(module: Module) -> Parameter | None:
    """Give a module's first floating-point parameter, its own or a sub-module's."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return parameter
    return None


def _being_traced() -> bool:
    """Whether the call is recorded by torch.compile, torch.jit.trace or an exporter."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def _in_backward() -> bool:
    """Whether a backward pass is running: activation checkpointing calls inner modules there."""
    return torch._C._current_graph_task_id() != -1
