"""Sees what a rank computes in a call of a root: inside of DDP, and of its rows alone.

What is around that, such as DistributedDataParallel (DDP) or the split of a batch, communicates
with other ranks and keeps account of it, and can't be repeated by one rank. So calls are captured
where they come to the module that computes, and repeated there.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain.shim.hooks.roots import Call, Root, RootCalls, is_sharded
from fasttrain.shim.levers.compile.targets import unwrapped

_MODE: Any = TorchDispatchMode  # without annotations
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")  # namespaces of operators
_INSIDE = "module"  # where DDP keeps the module that it wraps
_SHARDED = ("FullyShardedDataParallel", "FSDPModule")  # classes that need not be imported


class RepetitionError(Exception):
    """Raised if a call can't be repeated; the message says why."""


class InnerCalls:
    """Tells of calls of the modules that compute, until ``undo`` is closed.

    Args:
        roots: Routes the calls of roots.
        undo: Puts everything back.

    Attributes:
        on_call: Called before each with a root of its own, and its arguments.
        on_return: Called after each with its output.
    """

    def __init__(self, roots: RootCalls, undo: ExitStack) -> None:
        self.on_call: list[Callable[[Root, tuple[Any, ...], dict[str, Any]], None]] = []
        self.on_return: list[Callable[[Root, Any], None]] = []
        # As long as the root lives: a script may make a model for each fold, or each task.
        self._inner: weakref.WeakKeyDictionary[Root, Root] = weakref.WeakKeyDictionary()
        self._called: weakref.WeakSet[Root] = weakref.WeakSet()
        self._roots = roots
        self._outer = roots.around
        roots.around = self._around
        undo.callback(self._close)

    def roots(self) -> list[Root]:
        """Return the modules that were called, each as a root."""
        return list(self._called)

    def _close(self) -> None:
        if self._roots.around == self._around:  # what was around may have taken itself away
            self._roots.around = self._outer

    def _around(self, root: Root, module: Module, call: Call) -> Call:
        part = unwrapped(module)
        inner = root if part is module else self._inner.get(root)
        if inner is None:
            inner = self._inner[root] = replace(root, ref=weakref.ref(part))
        self._called.add(inner)
        if part is module:
            call = functools.partial(self._tell, inner, call)
        outer = call if self._outer is None else self._outer(root, module, call)
        if part is module:
            return outer
        told = _Told(part, functools.partial(self._tell, inner, part))
        return functools.partial(_with_inside, module, told, outer)

    def _tell(self, root: Root, call: Call, /, *args: Any, **kwargs: Any) -> Any:
        for listen in self.on_call:
            listen(root, args, kwargs)
        output = call(*args, **kwargs)
        for returned in self.on_return:
            returned(root, output)
        return output


class _Told:
    """Stands for a module that is called by another function, and is the module otherwise."""

    def __init__(self, module: Module, call: Call) -> None:
        self._module, self._call = module, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _with_inside(wrapper: Module, part: _Told, call: Call, /, *args: Any, **kwargs: Any) -> Any:
    """Make a call in which a wrapper has something in the place of its module."""
    # Found before what Module.__getattr__ looks up, and there only while the wrapper runs.
    vars(wrapper)[_INSIDE] = part
    try:
        return call(*args, **kwargs)
    finally:
        vars(wrapper).pop(_INSIDE, None)


class NoCollectives(_MODE):  # type: ignore[misc]
    """Dispatch mode in which operators that communicate raise RepetitionError."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COLLECTIVES:
            raise RepetitionError(f"{func} communicates with other ranks")
        return func(*args, **(kwargs or {}))


def communicates(module: Module) -> str:
    """Return why a call of a module would need the other ranks; empty if nothing shows that."""
    for part in Module.modules(module):
        names = [kind.__name__ for kind in type(part).__mro__]
        if isinstance(part, DistributedDataParallel) or any(it in names for it in _SHARDED):
            return f"a {type(part).__name__} is inside of it"
    if is_sharded(module):
        return "its parameters are shared among ranks"
    return ""
