"""Decides which modules run eagerly, with the reason; all others are compiled."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy as is_lazy_tensor
from torch.nn.utils.spectral_norm import SpectralNorm

from fasttrain.shim.hooks import patching
from fasttrain.shim.process.callsite import is_installed, location, own_prefixes

# Where these are not installed, but used from their sources.
_NOT_THE_SCRIPTS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[3]))


GENERATOR = "its forward is a generator"
COROUTINE = "its forward is a coroutine"
SPECTRAL_NORM = "torch.nn.utils.spectral_norm has wrong gradients when it is compiled"


def uncompilable(module: Module) -> str:
    """Return why a module can't be compiled; empty if it can."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is TorchScript"
    if isinstance(module, DataParallel):
        return "DataParallel copies it to threads at every call"
    if inspect.isgeneratorfunction(module.forward) or inspect.isasyncgenfunction(module.forward):
        return GENERATOR
    if inspect.iscoroutinefunction(module.forward):
        return COROUTINE
    if _has_spectral_norm(module):
        return SPECTRAL_NORM
    return ""


def is_lazy(module: Module) -> bool:
    """True if parameters or buffers are initialized only in the first call.

    In compiled code they would be drawn with the compiler's own random numbers.
    """
    return any(
        tensor is not None and is_lazy_tensor(tensor)
        for part in Module.modules(module)
        for tensor in (*part._parameters.values(), *part._buffers.values())
    )


def _has_spectral_norm(module: Module) -> bool:
    # On a CPU, inductor of torch 2.13 computes other gradients of `weight_orig` than eager torch,
    # also without fasttrain. The one of torch.nn.utils.parametrizations is right.
    hooks = (hook for part in Module.modules(module) for hook in part._forward_pre_hooks.values())
    return any(isinstance(hook, SpectralNorm) for hook in hooks)


def second_derivatives() -> str:
    """Return ``file:line`` where the script asks for second derivatives; empty if nowhere.

    A compiled graph has none ("torch.compile with aot_autograd does not currently support double
    backward"), and raises only in the second backward pass, when it is too late to run eagerly.
    """
    for path, source in _sources_with_create_graph():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.keyword) and _creates_graph(node):
                return location(path, node.lineno)
    return ""


def may_differentiate_twice() -> bool:
    """True if the script mentions ``create_graph``, as in ``create_graph=args.second_order``."""
    return any(_sources_with_create_graph())


def _sources_with_create_graph() -> Iterator[tuple[str, bytes]]:
    # Few files have it; parsing all, 30,000 lines, would take a second.
    for path in _script_files():
        file = Path(path)
        source = file.read_bytes() if file.is_file() else b""
        if b"create_graph" in source:
            yield path, source


def _creates_graph(keyword: ast.keyword) -> bool:
    # Only the literal True: training utilities pass ``create_graph=create_graph``, mostly False.
    value = keyword.value
    return keyword.arg == "create_graph" and isinstance(value, ast.Constant) and value.value is True


def _script_files() -> Iterator[str]:
    """Yield the files of the modules that are the user's own, not installed."""
    for module in tuple(sys.modules.values()):
        path = _file_of(module)
        if not isinstance(path, str) or not path.endswith(".py"):
            continue
        if not (path.startswith(_NOT_THE_SCRIPTS) or is_installed(path)):
            yield path


def _file_of(module: object) -> object:
    """Return a module's ``__file__``; not by its own ``__getattr__``, which may raise if lazy."""
    try:
        return object.__getattribute__(module, "__dict__").get("__file__")
    except AttributeError:  # not a module, but an object with slots
        return None


def unwrapped(module: Module) -> Module:
    """Return the module inside DistributedDataParallel, whose own forward isn't compiled."""
    return module.module if isinstance(module, DistributedDataParallel) else module


CHECK_EVERY_NODES = 500
# Iterations of one line in the same module; the layers of a deep model are different modules.
MOST_ROUNDS = 100


def refuse_long_loops(report: Callable[[str], None], undo: ExitStack) -> None:
    """Have dynamo give up a function in which it unrolls a loop of more than `MOST_ROUNDS`.

    A recurrent loop over time steps becomes one graph with every iteration in it. With two LSTM
    cells 60 iterations compiled for 50 s on a busy 2-core CPU (torch 2.13), and 1,000 for more than
    5 minutes. Such a function runs eagerly, and the receipt names the line.

    Args:
        report: Called with the line that repeats.
        undo: Takes the inverse.
    """
    from torch._dynamo import exc, output_graph

    tracer: Any = output_graph.SubgraphTracer
    original = tracer.create_proxy

    @functools.wraps(original)
    def create_proxy(self: Any, *args: Any, **kwargs: Any) -> Any:
        proxy = original(self, *args, **kwargs)
        if len(self.graph.nodes) % CHECK_EVERY_NODES == 0:
            line, rounds = _longest_loop(self.graph)
            if rounds > MOST_ROUNDS:
                report(line)
                raise exc.SkipFrame(f"a loop of more than {MOST_ROUNDS} iterations: {line}")
        return proxy

    patching.put(tracer, "create_proxy", create_proxy, undo)


def _longest_loop(graph: Any) -> tuple[str, int]:
    """Return the line that repeats most, by one operation in one module, and how often."""
    rounds: Counter[Any] = Counter()
    for node in graph.nodes:
        # A module that is called again is `name@1`, `name@2`, ...
        modules = tuple(m.partition("@")[0] for m in node.meta.get("nn_module_stack", ()))
        if node.op.startswith("call") and modules:
            rounds[node.stack_trace, modules, str(node.target)] += 1
    if not rounds:
        return "", 0
    (trace, *_), most = rounds.most_common(1)[0]
    return _where(trace), most


def _where(trace: str | None) -> str:
    """Return ``file:line`` of the user's innermost frame in a formatted stack."""
    lines = [line for line in (trace or "").splitlines() if line.startswith('  File "')]
    frames = [line.split('"') for line in lines]
    own = [frame for frame in frames if not frame[1].startswith(own_prefixes())] or frames
    if not own:
        return "an unknown line"
    _, path, rest = own[-1]  # `  File "PATH", line 12, in forward`
    return location(path, int(rest.split()[2].rstrip(",")))
