"""Puts compiled callables into ``Module._compiled_call_impl``, torch's own slot for them.

``Module.compile()`` fills the same slot. Deep copies and pickles don't contain it, because
``Module.__getstate__`` drops it. ``Module.compile()`` itself compiles nothing if the outermost
forward is one of torch.nn (pytorch#132923, #150915), because dynamo skips frames of torch's own
files. A function that is defined here is not skipped.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Module
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.hooks.roots import ROWS, in_backward
from fasttrain.shim.hooks.seams import Hooking, then
from fasttrain.shim.levers.compile.failed_calls import Repeating
from fasttrain.shim.levers.compile.graphs import GraphGuard
from fasttrain.shim.levers.compile.repetitions import Mode
from fasttrain.shim.levers.compile.targets import uncompilable
from fasttrain.shim.process.held_signals import HandlerErrors

Call = Callable[..., Any]

# Puts compiled callables into ``Module._compiled_call_impl``, torch's own slot for them.


REGISTRATIONS = (
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
    "register_backward_hook",
)
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def watch_hooks(changed: Callable[[Module | None, Any], None], undo: ExitStack) -> None:
    """Call ``changed`` with the module that got a hook, or with the mapping that lost one.

    A compiled graph contains the hooks that were there when it was traced. Dynamo can guard them,
    but that costs 3 us per submodule and call (150 submodules, torch 2.13: 2.8 % of an 18 ms step).
    To notice changes costs nothing as long as there are none.
    """
    for name in REGISTRATIONS:
        if hasattr(Module, name):
            registered = then(lambda module: changed(module, None))
            patching.wrap(Module, name, registered, undo, Hooking.COMPILE)

    original = RemovableHandle.remove

    @functools.wraps(original)
    def remove(handle: RemovableHandle) -> None:
        hooks = handle.hooks_dict_ref()
        original(handle)
        if hooks is not None and not torch.compiler.is_compiling():
            changed(None, hooks)

    patching.put(RemovableHandle, "remove", remove, undo)


def concerns(root: Module, module: Module | None, hooks: Any) -> bool:
    """True if a change of hooks concerns a compiled module or a part of it."""
    for part in Module.modules(root):
        if part is module:
            return True
        if module is None and any(getattr(part, name, None) is hooks for name in HOOKS):
            return True
    return False


HOOKS_CHANGE = "its hooks change again and again"

OWN_KIND = "called with tensors of a class of the script's, which torch.compile can't run"
UNDER_MODE = (
    "called under a dispatch mode such as FlopCounterMode, which sees no compiled operation"
)
UNDER_FUNC = "called under torch.func's transforms, where torch.compile can't run"
# A script that changes its hooks more often would compile all the time.
MOST_RENEWALS = 3
EAGER_CALLS = "eager calls"
REPEATED_CALLS = "repeated calls"
REPEATED = "{} was repeated eagerly where a compiled call of it failed: {}"
FAILS = "its compiled calls fail more often than not"
# Even a tiny module takes as long to compile as thousands of its calls.
FEW_CALLS = 100
# Calls that compile without delay: for fixed and for changing shapes, to train and to evaluate.
FREE_STALLS = 4
PUT_OFF = (
    f"{{name}} was compiled in {FREE_STALLS} of its first {{calls}} calls: again after"
    f" {FEW_CALLS}, {2 * FEW_CALLS}, {4 * FEW_CALLS}, ... calls, and until then"
    " what fits no graph runs eagerly"
)


@dataclass(slots=True, eq=False)
class Stalls:
    """Counts the calls in which dynamo compiled, and says when the next one may.

    A model whose shapes, attributes or tables change at each call is compiled at each call: up to
    dynamo's limit of eight times for every frame, which can take minutes where the calls take
    seconds. So each further one needs twice as many calls as the last. Calls are counted and no
    time is taken, so that a run can be repeated and all ranks do the same.

    Attributes:
        calls: Number of calls.
        stalled: Number of those in which something was compiled.
    """

    calls: int = 0
    stalled: int = 0

    @property
    def until(self) -> int:
        """The number of calls before which nothing is compiled."""
        further = self.stalled - FREE_STALLS
        return FEW_CALLS * 2**further if further >= 0 else 0


@dataclass(slots=True, eq=False)
class Filling:
    """How a module was compiled.

    Attributes:
        finish: Applied to its output inside the graph; None for a block.
        guard: Decides which of its calls are replayed as CUDA graphs; None if none is.
        renewals: How often it was compiled again because its hooks had changed.
        calls: How often it was called.
        failed: How many of these calls failed in a graph, and were repeated eagerly.
        stalls: Its calls in which something was compiled.
        on: Whether its calls run compiled.
        may_compile: Whether they may compile what fits no graph.
    """

    finish: Callable[[Any], Any] | None = None
    guard: GraphGuard | None = None
    renewals: int = 0
    calls: int = 0
    failed: int = 0
    stalls: Stalls = field(default_factory=Stalls)
    on: Mode = field(default_factory=Mode)
    may_compile: Mode = field(default_factory=Mode)


class _Slot(functools.partial[Any]):
    """The value of a module's slot; in a copy or a pickle of the module it becomes None.

    A subclass of partial, whose call adds no frame.

    Attributes:
        of: A weak reference to the module.
    """

    of: weakref.ref[Module]

    def __reduce__(self) -> Any:
        """Return the constructor of None, for copies and pickles."""
        return type(None), ()


def _slot_of(ref: weakref.ref[Module], call: Call) -> _Slot:
    slot = _Slot(call)
    slot.of = ref
    return slot


def empty_if_copied(module: Module) -> None:
    """Empty the slots that a module and its parts have got with another's dictionary.

    ``clone.__dict__ = module.__dict__.copy()``, as in learn2learn's ``clone_module`` and in
    DataParallel, copies the slot too, which would call the module that it was filled for.
    """
    for part in Module.modules(module):
        slot = vars(part).get("_compiled_call_impl")
        if isinstance(slot, _Slot) and slot.of() is not part:
            del vars(part)["_compiled_call_impl"]


class Slots:
    """Fills and empties the slots of modules.

    Attributes:
        passed_by: Why some call of a compiled module ran eagerly; empty if none did.
        on: Whether compiled modules run compiled.
        compilations: Number of compilations that have begun; counted by the lever.
        handler_errors: Those of the script's signal handlers; dynamo would take them for its own.

    Args:
        compile: torch.compile.
        mode: Its mode, without CUDA graphs.
        recorder: The compile lever's.
    """

    def __init__(self, compile: Call, mode: str, recorder: OutcomeRecorder) -> None:
        self._compile = functools.partial(compile, mode=None if mode == "default" else mode)
        self._recorder = recorder
        self.passed_by = ""
        self.on = True
        self.compilations = 0
        self.handler_errors = HandlerErrors()
        self._filled: weakref.WeakKeyDictionary[Module, Filling] = weakref.WeakKeyDictionary()

    def __contains__(self, module: Module) -> bool:
        return module in self._filled

    def __len__(self) -> int:
        return len(self._filled)

    def fill(self, module: Module, forward: Call, filling: Filling, undo: ExitStack) -> None:
        """Compile a module's calls, which ``forward`` makes: a function of `separate_function`."""
        self._filled[module] = filling
        self._put(module, forward, filling)
        undo.callback(_empty, weakref.ref(module))
        self._recorder.counts["targets"] += 1

    def release(self, module: Module) -> None:
        """Run a module eagerly from now on."""
        _empty(weakref.ref(module))
        self._filled.pop(module, None)

    def _put(self, module: Module, forward: Call, filling: Filling) -> None:
        run = self._putting_off(self._compile(forward), forward, filling, type(module).__name__)
        ref = weakref.ref(module)
        repeating = Repeating(module, functools.partial(self._failed, ref, filling))
        vars(module)["_compiled_call_impl"] = self._slot(ref, run, filling, repeating)

    def _putting_off(self, compiled: Call, forward: Call, filling: Filling, name: str) -> Call:
        """Return a function that runs compiled, and compiles where `Stalls` allows it."""
        only_run: Call = torch._dynamo.run(forward)  # runs eagerly what fits no graph
        stalls, may_compile = filling.stalls, filling.may_compile

        def run(module: Module, /, *args: Any, **kwargs: Any) -> Any:
            stalls.calls += not in_backward()
            if not may_compile.choose(stalls.calls > stalls.until, module, args, kwargs):
                before = EAGER.count
                output = only_run(module, *args, **kwargs)
                if EAGER.count > before:
                    self._recorder.counts[EAGER_CALLS] += 1
                return output
            before = self.compilations
            output = compiled(module, *args, **kwargs)
            if self.compilations > before:
                stalls.stalled += 1
                if stalls.stalled == FREE_STALLS:
                    self._recorder.note(PUT_OFF.format(name=name, calls=stalls.calls))
            return output

        return run

    def _slot(
        self, ref: weakref.ref[Module], compiled: Call, filling: Filling, repeating: Repeating
    ) -> Call:
        """Return the callable for a module's slot; weakly bound, because the module holds it."""
        guard = filling.guard

        def call(*args: Any, **kwargs: Any) -> Any:
            module: Any = ref()
            # Under a mode of the script's dynamo would never run the function compiled again.
            under_mode = torch._C._len_torch_dispatch_stack() > 0 and _stops_dynamo()
            if under_mode:
                self.passed_by = UNDER_MODE
            chosen = filling.on.choose(self.on and not under_mode, module, args, kwargs)
            if under_mode or not chosen:
                return module._call_impl(*args, **kwargs)
            filling.calls += 1
            # Dynamo refuses to run under torch.jit.trace and inside torch.func's transforms.
            transformed = torch._C._functorch.peek_interpreter_stack()
            if transformed or forward_ad._current_level >= 0 or torch._C._get_tracing_state():
                self.passed_by = UNDER_FUNC if transformed else self.passed_by
                return module._call_impl(*args, **kwargs)
            if _has_own_kind(args) or _has_own_kind(kwargs.values()):
                self.passed_by = OWN_KIND
                self._recorder.note(f"{type(module).__name__} runs eagerly where it is {OWN_KIND}")
                return module._call_impl(*args, **kwargs)
            through = self.handler_errors.through
            if guard is not None:
                return through(guard.call, compiled, module, args, kwargs)
            return repeating.call(functools.partial(through, compiled), module, args, kwargs)

        return _slot_of(ref, call)

    def _failed(self, ref: weakref.ref[Module], filling: Filling, why: str) -> None:
        """Record a call that has failed in a graph, and give the module up if most of them do."""
        module = ref()
        filling.failed += 1
        self._recorder.counts[REPEATED_CALLS] += 1
        if filling.failed == 1:
            self._recorder.note(REPEATED.format(type(module).__name__, why))
        if module is not None and FREE_STALLS <= filling.failed > filling.calls / 2:
            self.release(module)
            self._recorder.note(f"{type(module).__name__} runs eagerly: {FAILS}")

    def on_hook(self, module: Module | None, hooks: Any) -> None:
        """Have the next call of each module that a change of hooks concerns compile it again."""
        for target in [t for t in self._filled if concerns(t, module, hooks)]:
            ref = weakref.ref(target)
            renew = _slot_of(ref, functools.partial(self._renew, ref))
            vars(target)["_compiled_call_impl"] = renew

    def _renew(self, ref: weakref.ref[Module], /, *args: Any, **kwargs: Any) -> Any:
        target: Any = ref()
        name = type(target).__name__
        filling = self._filled[target]
        filling.renewals += 1
        reason = uncompilable(target)
        if filling.renewals > MOST_RENEWALS:
            reason = HOOKS_CHANGE
        if reason:
            self.release(target)
            self._recorder.note(f"{name} runs eagerly: {reason}")
            return target._call_impl(*args, **kwargs)
        if filling.guard is not None:
            filling.guard.refuse("its hooks change")
        self._put(target, separate_function(name, filling.finish), filling)
        return target._compiled_call_impl(*args, **kwargs)


def _stops_dynamo() -> bool:
    """True under a dispatch mode for which dynamo skips a function, and never runs it again.

    Source: torch 2.13, ``torch/utils/_python_dispatch.py``, any_torch_dispatch_mode_on_stack
    """
    modes = _get_current_dispatch_mode_stack()
    return not all(
        any(getattr(mode, name, lambda: False)() for name in _SEEN_THROUGH) for mode in modes
    )


_SEEN_THROUGH = "is_infra_mode", "ignore_compile_internals"


class _Eager:
    """Counts the calls of functions of `separate_function` that don't run as a graph."""

    count = 0


EAGER = _Eager()
_DISABLED: Any = torch._C._disabled_torch_function_impl


def _has_own_kind(values: Iterable[Any]) -> bool:
    """True if there is a tensor whose class acts on what is done with it, but can't be traced.

    Dynamo puts it into a graph whose operators then refuse it, as ``torch.compile`` by hand does.
    """
    return any(map(_is_own_kind, values))


def _is_own_kind(value: Any) -> bool:
    kind = type(value)
    if kind is Tensor:
        return False
    if isinstance(value, Tensor):
        acts = kind.__torch_function__ is not _DISABLED
        return acts and not hasattr(kind, "__tensor_flatten__")
    if kind is dict:
        return _has_own_kind(value.values())
    return kind in (list, tuple) and _has_own_kind(value)


def separate_function(name: str, finish: Callable[[Any], Any] | None = None) -> Call:
    """Return a new function that calls a module, with a code object of its own.

    Dynamo counts recompiles by code object: roots with the same one would share its limit of eight.

    Args:
        name: The module's class, which dynamo's messages show.
        finish: Applied to the output inside the graph.
    """

    def block(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            EAGER.count += 1
        if ROWS.only:  # read for dynamo's guard alone
            return module._call_impl(*args, **kwargs)
        return module._call_impl(*args, **kwargs)

    def root(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        assert finish is not None
        if not torch.compiler.is_compiling():
            EAGER.count += 1
        if ROWS.only:
            return finish(module._call_impl(*args, **kwargs))
        return finish(module._call_impl(*args, **kwargs))

    function = root if finish else block
    function.__code__ = function.__code__.replace(co_name=name)
    return function


def _empty(ref: weakref.ref[Module]) -> None:
    module = ref()
    if module is not None:
        vars(module).pop("_compiled_call_impl", None)
