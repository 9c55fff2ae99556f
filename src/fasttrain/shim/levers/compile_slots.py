"""The compiled callables in ``Module._compiled_call_impl``, torch's own slot for them.

The slot is what ``Module.compile()`` fills; ``__getstate__`` drops it, so that deep copies and
pickles know nothing of it. ``Module.compile()`` itself compiles nothing when the outermost forward
lives in torch.nn (pytorch#132923, #150915), because dynamo skips frames of torch's own files; a
function defined here is not skipped.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from fasttrain.shim.ledger import Ledger
from fasttrain.shim.levers.compile_graphs import GraphGuard
from fasttrain.shim.levers.compile_hooks import concerns

Call = Callable[..., Any]
# A script that changes its hooks more often than this would compile for ever.
MOST_RENEWALS = 3


@dataclass(slots=True, eq=False)
class Filling:
    """How a module was compiled.

    Attributes:
        finish: What its graph does with its output; None for a block.
        guard: Says which of its calls may be replayed as CUDA graphs; None where none may.
        renewals: How often it was compiled anew because its hooks had changed.
    """

    finish: Callable[[Any], Any] | None = None
    guard: GraphGuard | None = None
    renewals: int = 0


class Slots:
    """Fills and empties the slots of modules.

    Args:
        compile: torch.compile.
        mode: Its mode without CUDA graphs.
        ledger: The compile lever's.
    """

    def __init__(self, compile: Call, mode: str, ledger: Ledger) -> None:
        self._compile = functools.partial(compile, mode=None if mode == "default" else mode)
        self._ledger = ledger
        self._filled: weakref.WeakKeyDictionary[Module, Filling] = weakref.WeakKeyDictionary()

    def __contains__(self, module: Module) -> bool:
        return module in self._filled

    def __len__(self) -> int:
        return len(self._filled)

    def fill(self, module: Module, forward: Call, filling: Filling, undo: ExitStack) -> None:
        """Compile a module by a function of `separate_function`."""
        self._filled[module] = filling
        self._put(module, forward, filling)
        undo.callback(_empty, weakref.ref(module))
        self._ledger.counts["targets"] += 1

    def release(self, module: Module) -> None:
        """Have a module run eagerly from now on."""
        _empty(weakref.ref(module))
        self._filled.pop(module, None)

    def _put(self, module: Module, forward: Call, filling: Filling) -> None:
        call = _slot(module, self._compile(forward), filling.guard)
        vars(module)["_compiled_call_impl"] = call

    def on_hook(self, module: Module | None, hooks: Any) -> None:
        """Have the next call compile anew what was traced with other hooks than it has now."""
        for target in [t for t in self._filled if concerns(t, module, hooks)]:
            renew: Any = functools.partial(self._renew, weakref.ref(target))
            vars(target)["_compiled_call_impl"] = renew

    def _renew(self, ref: weakref.ref[Module], *args: Any, **kwargs: Any) -> Any:
        target: Any = ref()
        name = type(target).__name__
        filling = self._filled[target]
        filling.renewals += 1
        if filling.renewals > MOST_RENEWALS:
            self.release(target)
            self._ledger.note(f"{name} runs eagerly: its hooks change all the time")
            return target._call_impl(*args, **kwargs)
        if filling.guard is not None:
            filling.guard.refuse("its hooks change")
        self._put(target, separate_function(name, filling.finish), filling)
        return target._compiled_call_impl(*args, **kwargs)


def separate_function(name: str, finish: Callable[[Any], Any] | None = None) -> Call:
    """Give a new function with a code object of its own, named for dynamo's messages.

    Dynamo counts recompiles by code object: roots that shared one would share its limit of eight.

    Args:
        name: The module's class.
        finish: What is done with the output inside the graph.
    """

    def block(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    def root(module: Any, *args: Any, **kwargs: Any) -> Any:
        assert finish is not None
        return finish(module._call_impl(*args, **kwargs))

    function = root if finish else block
    function.__code__ = function.__code__.replace(co_name=name)
    return function


def _slot(module: Module, compiled: Call, guard: GraphGuard | None) -> Call:
    """Give what takes a module's calls; it holds the module weakly, as the module holds it."""
    ref = weakref.ref(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        module: Any = ref()
        # Dynamo refuses to run under torch.jit.trace and inside torch.func's transforms.
        if torch._C._get_tracing_state() or torch._C._functorch.peek_interpreter_stack():
            return module._call_impl(*args, **kwargs)
        if guard is not None and guard.admits(module, args, kwargs):
            return guard.replay(module, args, kwargs)
        return compiled(module, *args, **kwargs)

    return call


def _empty(ref: weakref.ref[Module]) -> None:
    module = ref()
    if module is not None:
        vars(module).pop("_compiled_call_impl", None)
