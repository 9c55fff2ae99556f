"""Finds the roots: the outermost modules with parameters that the script calls.

`torch.nn.Module.__call__` is replaced by a plain closure, which adds one frame. Inside a root it
reads one thread-local flag (about 50 ns per module on a 2-core CPU, torch 2.13) and then does what
torch's own does. Only the outermost call takes the slower path, where levers act.

Two other ways don't work. Global module hooks see the same calls, but put every module on torch's
slow path. Roots found by the optimizer's parameters would lack teachers, averaged copies of the
model, and loops without an optimizer.

Source: ``torch/nn/modules/module.py`` of torch 2.13, ``Module._wrapped_call_impl``.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList, Parameter, Sequential
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.data import get_worker_info

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.dynamo import pass_over
from fasttrain.shim.hooks.seams import Exporting
from fasttrain.shim.process.callsite import call_site, location


def in_constructor() -> bool:
    """True if a module's constructor is running: some call their parts to learn their shapes."""
    return next(_frames_of_modules("__init__"), None) is not None


def runs_later(module: Module) -> bool:
    """True if a module's forward is a generator or coroutine, whose code its call doesn't run."""
    code = getattr(module.forward, "__code__", None)
    return bool(getattr(code, "co_flags", 0) & _RUNS_LATER)


def whose_forward(part: Module) -> str:
    """Return the module around a part whose ``forward`` the script called directly.

    ``model.forward(x)`` bypasses ``Module.__call__``, and with it hooks and levers. Only the parts
    that such a forward calls are seen.

    Returns:
        The module's class and the line of the call, ``Net (train.py:12)``; empty if there is none.
    """
    for frame, module in _frames_of_modules("forward"):
        caller = frame.f_back
        inside = any(other is part for other in Module.modules(module))
        if frame.f_code.co_flags & _RUNS_LATER:
            continue  # its call has ended, and was seen
        if caller is not None and module is not part and inside:
            return f"{type(module).__name__} ({location(*_place(caller))})"
    return ""


def _frames_of_modules(name: str) -> Iterator[tuple[FrameType, Module]]:
    """Yield the frames of methods of that name whose object is a module, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code: CodeType = frame.f_code
        if code.co_name == name and code.co_varnames:  # f_locals makes a copy: only if needed
            owner = frame.f_locals.get(code.co_varnames[0])
            if isinstance(owner, Module):
                yield frame, owner
        frame = frame.f_back


def _place(frame: FrameType) -> tuple[str, int]:
    return frame.f_code.co_filename, frame.f_lineno


class OneRanksRows:
    """Whether a call computes the rows of one rank, whose losses are summed over all ranks.

    A graph that is compiled in such a call contains the sums. Compiled calls read it, so that
    dynamo guards on it, and a whole call of the same shapes gets a graph of its own.
    """

    __slots__ = ("only",)

    def __init__(self) -> None:
        self.only = False


ROWS = OneRanksRows()
LOOK_EVERY = 64  # calls of a frozen root, besides the 1st, 2nd, 4th, 8th and so on
_RUNS_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
Call = Callable[..., Any]
Region = Callable[["Root", Call, tuple[Any, ...], dict[str, Any]], Any]
Around = Callable[["Root", Module, Call], Call]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Root:
    """One outermost module.

    Attributes:
        ref: A weak reference to the module.
        name: The name of its class.
        where: Where the script called it first.
        trainable: Whether any of its parameters required a gradient at its first call, or at one of
            those at which that was looked for again.
        device: Where its parameters were at its first call, such as ``cuda:0``.
        replica: The data-parallel lever's state of this root.
        precision: The amp lever's state of this root.
        calls: What its calls have returned, for the snapshot lever.
        outer: The class and call site of the module whose ``forward`` the script called directly,
            so that this part of it is a root; empty if there is none.
        lowered_on: The device type on which the amp lever had its last forward pass in low
            precision; None if it hadn't.
        frozen_calls: Calls with gradients switched on while it wasn't trainable.
    """

    ref: weakref.ref[Module]
    name: str
    where: str
    trainable: bool
    device: str = ""
    replica: Any = None
    precision: Any = None
    calls: Any = None
    outer: str = ""
    lowered_on: str | None = None
    frozen_calls: int = 0
    # Where it is: torch can't swap the tensors of a parameter that has a weak reference.
    _part: Callable[[], Module | None] = field(default=lambda: None, repr=False)
    _key: str = ""

    def parameter(self) -> Parameter | None:
        """Return the first floating-point parameter; searched again if the module has lost it.

        A single number counts only if there is nothing else: `Parameter(torch.tensor(np.log(14)))`
        is float64, whatever the model is.
        """
        part, parameter = self._part(), None
        if part is not None and self._key in part._parameters:  # a scripted module has no dict
            parameter = part._parameters[self._key]
        module = self.ref() if parameter is None else None
        if module is None:
            return parameter
        places = [
            (part, key, found)
            for part in Module.modules(module)
            for key, found in part._parameters.items()
            if found is not None and found.is_floating_point()
        ]
        for part, key, found in sorted(places, key=lambda place: _is_single(place[2]))[:1]:
            self._part, self._key, parameter = weakref.ref(part), key, found
        return parameter


def _is_single(parameter: Parameter) -> bool:
    return not is_lazy(parameter) and parameter.numel() == 1


class _Inside(threading.local):
    """Whether this thread is inside a root; each thread has a model call of its own.

    Attributes:
        flag: Whether it is.
        part: Makes the calls of modules in place of torch, where a lever wants to see the modules
            inside a root; None elsewhere.
    """

    flag = False
    part: Callable[[Module, tuple[Any, ...], dict[str, Any]], Any] | None = None


# torch's own, so that a traceback has its lines: it calls the slot of `Module.compile`, or forward.
_CALL: Any = Module.__call__


class RootCalls:
    """Routes the calls of roots, so that levers can act around them.

    Attributes:
        region: Makes the call, for the amp lever; None makes a plain call.
        around: Returns what is called in place of the root, inside the region, for the
            data-parallel lever; None calls the root.
        low_dtype: The precision of the region; None without one.
        lowered: Whether any call of a root has run in low precision.
        on_lowering: Called with whether any root runs in low precision, when that changes.
        inside: Whether this thread is inside a root's call.
        on_discover: Called once for each new root, before its first call.
        on_trainable: Called once for a root that was frozen at first, before a call in which it
            isn't.
        on_call: Called before every call of a root with its positional and keyword arguments.
        on_return: Called after every call of a root with its output.
    """

    def __init__(self) -> None:
        self.region: Region | None = None
        self.around: Around | None = None
        self.low_dtype: torch.dtype | None = None
        self.lowered = self._lowering = False
        self.on_lowering: list[Callable[[bool], None]] = []
        self.on_discover: list[Callable[[Root, Module], None]] = []
        self.on_trainable: list[Callable[[Root, Module], None]] = []
        self.on_call: list[Callable[[Root, tuple[Any, ...], dict[str, Any]], None]] = []
        self.on_return: list[Callable[[Root, Any], None]] = []
        self.last: Root | None = None
        self.inside = _Inside()
        self._table: dict[int, Root] = {}
        self._discovery = threading.RLock()

    def install(self, undo: ExitStack) -> None:
        """Route every module call through here until ``undo`` is closed."""
        inside, outermost, call = self.inside, self._outermost, _CALL

        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if inside.flag:
                return call(self, *args, **kwargs)
            return outermost(self, args, kwargs)

        for function in (__call__, RootCalls._outermost):
            pass_over(function)
        patching.put(Module, "__call__", __call__, undo)
        allow_deeper_calls(undo)
        for name in ("trace", "trace_module", "_get_trace_graph"):  # the last one is torch.onnx's
            patching.wrap(torch.jit, name, self._stay_out_of, undo, Exporting.ROOTS)

    @contextmanager
    def bare(self, roots: Iterable[Root]) -> Iterator[None]:
        """Have nothing around calls of roots in the block, and these be roots although inside."""
        before, around, last = dict(self._table), self.around, self.last
        called = {id(module): root for root in roots if (module := root.ref()) is not None}
        self.around = None
        self._table.update(called)
        try:
            yield
        finally:
            self.around, self.last = around, last
            for key in called:
                del self._table[key]
                if key in before:
                    self._table[key] = before[key]

    def leave_plain(self) -> None:
        """Run roots without a region from now on."""
        self.region = self.low_dtype = None
        self.set_lowering(lowering=False)

    def set_lowering(self, *, lowering: bool) -> None:
        """Note whether any root runs in low precision."""
        if lowering is not self._lowering:
            self._lowering = lowering
            for listen in self.on_lowering:
                listen(lowering)

    def finish(self, output: Any) -> Any:
        """Return a compiled root's output in fp32, as the last operation of its graph.

        Within one graph the compiler doesn't round a value that is cast down and up again, so that
        a last sigmoid keeps its fp32 result. Other containers than these are cast after the graph,
        by the region.
        """
        return self._finish(output, [])

    def _finish(self, output: Any, finished: list[tuple[Tensor, Tensor]]) -> Any:
        if isinstance(output, Tensor):
            low = output.dtype is self.low_dtype
            if not (low and torch.is_autocast_enabled(output.device.type)):
                return output
            for given, result in finished:  # one that is returned in two places stays one
                if given is output:
                    return result
            # As `float()`, spelled so that dynamo's graph shows whose it is: `cast_for_script`.
            result = output.to(torch.float32, False, False)  # noqa: FBT003
            finished.append((output, result))
            return result
        if type(output) in (tuple, list):
            return type(output)([self._finish(item, finished) for item in output])
        if type(output) is dict:
            return {key: self._finish(item, finished) for key, item in output.items()}
        return output

    def _stay_out_of(self, original: Any) -> Any:
        """Call nothing a root while torch.jit traces, or compares its trace with plain calls."""
        inside = self.inside

        @functools.wraps(original)
        def stay_out(*args: Any, **kwargs: Any) -> Any:
            before, inside.flag = inside.flag, True
            try:
                return original(*args, **kwargs)
            finally:
                inside.flag = before

        return stay_out

    def _outermost(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _being_traced():  # first of all: what follows would be traced, too
            return _CALL(module, *args, **kwargs)
        if self.inside.part is not None:
            return self.inside.part(module, args, kwargs)
        root = self._table.get(id(module))
        if root is None or root.ref() is not module:
            root = self._root_of(module)
        if root is not None and not root.trainable and torch.is_grad_enabled():
            self._look_for_gradients(root, module)
        call: Call = module._compiled_call_impl or functools.partial(_CALL, module)
        if root is None and isinstance(module, ParametrizationList):
            # The script reads a weight: its parts are no models either.
            return self._stay_out_of(call)(*args, **kwargs)
        if root is None:
            return call(*args, **kwargs)
        self.last = root
        for listen in self.on_call:
            listen(root, args, kwargs)
        if self.around is not None:
            call = self.around(root, module, call)
        region = self.region
        inside = self.inside
        inside.flag = True
        try:
            output = call(*args, **kwargs) if region is None else region(root, call, args, kwargs)
        finally:
            inside.flag = False
        for returned in self.on_return:
            returned(root, output)
        return output

    def _root_of(self, module: Module) -> Root | None:
        if in_backward() or get_worker_info() is not None or in_constructor():
            return None
        if isinstance(module, ParametrizationList):
            return None
        with self._discovery:  # two threads may call a new root at once
            root = self._table.get(id(module))
            if root is not None and root.ref() is module:
                return root
            parameter = first_parameter(module)
            return None if parameter is None else self._discover(module, parameter)

    def _discover(self, module: Module, parameter: Parameter) -> Root:
        key = id(module)
        root = Root(
            ref=weakref.ref(module, lambda _: self._forget(key)),
            name=type(module).__name__,
            where=call_site(),
            trainable=any(p.requires_grad for p in parameters_of(module)),
            device=str(parameter.device),
            outer=whose_forward(module),
        )
        self._table[key] = root
        for listen in self.on_discover:
            listen(root, module)
        return root

    def _look_for_gradients(self, root: Root, module: Module) -> None:
        """Look whether the script has thawed a root, at a few of its calls: that takes a while.

        A GAN often freezes its discriminator for the generator's step, which comes first.
        """
        root.frozen_calls = calls = root.frozen_calls + 1
        if calls & (calls - 1) and calls % LOOK_EVERY:
            return
        root.trainable = any(p.requires_grad for p in parameters_of(module))
        if root.trainable:
            for listen in self.on_trainable:
                listen(root, module)

    def _forget(self, key: int) -> None:
        root = self._table.pop(key, None)
        if root is not None:
            root.precision = None  # `last` may keep the root itself


_OWN_FRAMES = 100  # around a root's call, and below the script
_MOST = 2**31 - 1  # a C int


def allow_deeper_calls(undo: ExitStack) -> None:
    """Have Python's recursion limit be one of the script's own frames and torch's.

    Each call of a module inside another has one frame more than torch's three. So modules that the
    script nests as deep as its limit allows would exceed it. The script still reads and sets its
    own limit.
    """
    limit = sys.getrecursionlimit()

    def get(original: Any) -> Any:
        @functools.wraps(original)
        def getrecursionlimit() -> int:
            return limit

        return getrecursionlimit

    def put(original: Any) -> Any:
        @functools.wraps(original)
        def setrecursionlimit(new: int, /) -> None:
            nonlocal limit
            with suppress(TypeError):
                new = operator.index(new)
            valid = isinstance(new, int) and 0 < new <= _MOST
            original(min(new + new // 3 + _OWN_FRAMES, _MOST) if valid else new)
            limit = new

        return setrecursionlimit

    patching.wrap(sys, "getrecursionlimit", get, undo)
    put_back = sys.setrecursionlimit
    patching.wrap(sys, "setrecursionlimit", put, undo)
    sys.setrecursionlimit(limit)
    undo.callback(lambda: put_back(limit))


def parameters_of(module: Module) -> Iterator[Parameter]:
    """Yield the parameters of a module and its parts, even if it overrides ``parameters()``."""
    for part in Module.modules(module):
        yield from (p for p in part._parameters.values() if p is not None)


def is_sharded(module: Module) -> bool:
    """True if a module has parameters of which each rank holds a part (DTensors)."""
    return any(hasattr(parameter, "placements") for parameter in parameters_of(module))


def first_parameter(module: Module) -> Parameter | None:
    """Return a module's first floating-point parameter, its own or a sub-module's."""
    return next((p for p in parameters_of(module) if p.is_floating_point()), None)


def _being_traced() -> bool:
    """True if torch.compile, torch.jit.trace or an exporter is recording the call."""
    return torch._C._get_tracing_state() is not None or torch.compiler.is_compiling()


def in_backward() -> bool:
    """True if a backward pass is running, in which activation checkpointing calls modules again.

    Such a call has to do what the forward pass did, whatever was switched since: tensors that the
    forward pass has saved are taken from it.
    """
    return torch._C._current_graph_task_id() != -1


def repeated_blocks(module: Module) -> list[Module]:
    """Return the modules of which a ModuleList or Sequential holds several of the same class.

    Such blocks are compiled once for all of a class, and sharded one by one.
    """
    found: list[Module] = []
    for container in module.modules():
        if not isinstance(container, ModuleList | Sequential):
            continue
        by_class: defaultdict[type, list[Module]] = defaultdict(list)
        for child in container.children():
            if any(True for _ in child.children()):  # a lone Linear or ReLU is no block
                by_class[type(child)].append(child)
        for blocks in by_class.values():
            if len(blocks) > 1:
                found.extend(blocks)
    inner = {id(part) for block in found for part in block.modules() if part is not block}
    return [block for block in found if id(block) not in inner]
