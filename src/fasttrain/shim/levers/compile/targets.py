"""Which modules are compiled, and which are left to run eagerly, with the reason."""

from __future__ import annotations

import ast
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy as is_lazy_tensor
from torch.nn.utils.spectral_norm import SpectralNorm

from fasttrain.shim.process.callsite import location

_INSTALLED = (
    *(str(path) for path in map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))),
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[3]),
)


def uncompilable(module: Module) -> str:
    """Give the reason why a module is to run eagerly; empty if it can be compiled."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is TorchScript"
    if isinstance(module, DataParallel):
        return "DataParallel copies it to threads at every call"
    if inspect.isgeneratorfunction(module.forward):
        return "its forward is a generator"
    if _has_spectral_norm(module):
        return "torch.nn.utils.spectral_norm gets wrong gradients when it is compiled"
    return ""


def is_lazy(module: Module) -> bool:
    """Whether parameters or buffers get their shapes, and their numbers, in the first call.

    A compiler would draw them with its own random numbers.
    """
    return any(
        tensor is not None and is_lazy_tensor(tensor)
        for part in Module.modules(module)
        for tensor in (*part._parameters.values(), *part._buffers.values())
    )


def _has_spectral_norm(module: Module) -> bool:
    # On a CPU, inductor of torch 2.13 gives other gradients of `weight_orig` than eager torch, with
    # and without the levers. That of torch.nn.utils.parametrizations gets the right ones.
    hooks = (hook for part in Module.modules(module) for hook in part._forward_pre_hooks.values())
    return any(isinstance(hook, SpectralNorm) for hook in hooks)


def second_derivatives() -> str:
    """Give ``file:line`` where the script asks for second derivatives; empty if nowhere.

    A compiled graph has none ("torch.compile with aot_autograd does not currently support double
    backward"), and says so only in the second backward pass, when it is too late to run eagerly.
    """
    for path in _script_files():
        file = Path(path)
        tree = ast.parse(file.read_bytes()) if file.is_file() else ast.Module([], [])
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and _creates_graph(node):
                return location(path, node.lineno)
    return ""


def _creates_graph(keyword: ast.keyword) -> bool:
    # Only the literal: training utilities pass ``create_graph=create_graph`` on, mostly False.
    value = keyword.value
    return keyword.arg == "create_graph" and isinstance(value, ast.Constant) and value.value is True


def _script_files() -> Iterator[str]:
    """Give the files of the modules that are the user's own, not installed."""
    for module in tuple(sys.modules.values()):
        path = _file_of(module)
        if isinstance(path, str) and path.endswith(".py") and not path.startswith(_INSTALLED):
            yield path


def _file_of(module: object) -> object:
    """Return a module's ``__file__``, without its own ``__getattr__``: a lazy one may raise."""
    try:
        return object.__getattribute__(module, "__dict__").get("__file__")
    except AttributeError:  # something else than a module, with slots
        return None


def unwrapped(module: Module) -> Module:
    """Give the module inside DistributedDataParallel, whose own forward isn't compiled."""
    return module.module if isinstance(module, DistributedDataParallel) else module
