"""Has what a script reads off shards, or assigns to them, be that of the whole tensors."""

from __future__ import annotations

import functools
import itertools
import sys
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from fasttrain.shim.data_parallel.shards import mixed
from fasttrain.shim.data_parallel.shards.checkpoints import cut_like, whole_of
from fasttrain.shim.data_parallel.shards.refusals import data_error, explain, name_of
from fasttrain.shim.data_parallel.shards.whole_copies import COPIES, current, set_base
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.containers import map_tensors
from fasttrain.shim.hooks.roots import is_sharded
from fasttrain.shim.hooks.seams import Exporting, Filing
from fasttrain.shim.process import refusal
from fasttrain.shim.process.callsite import own_prefixes
from fasttrain.shim.process.import_hook import after_import
from fasttrain.shim.process.refusal import refuse

_NUMBER: Any = torch.ops.aten._local_scalar_dense.default  # reads a number
# Functions that return a scalar of all gradients, which is a DTensor.
_CLIPPERS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")
_LINE = 80  # characters of a line in which torch shows tensors


def install(undo: ExitStack) -> None:
    """Have numbers that a script reads off shards be those of the whole tensors.

    torch gives each rank that of its own shard, such as for ``weight.grad.norm().item()``.
    """
    from torch.distributed.tensor import DTensor

    dispatcher: Any = DTensor._op_dispatcher
    handlers: dict[Any, Any] = dispatcher._custom_op_handlers
    handlers[_NUMBER] = _number
    undo.callback(handlers.pop, _NUMBER, None)
    data: Any = vars(torch._C.TensorBase)["data"]
    assign = functools.partial(_assign, data.__set__)
    patching.put(DTensor, "data", property(lambda t: set_base(data.__get__(t), t), assign), undo)
    assign_whole = functools.partial(_assign_whole, data.__set__)
    patching.put(Tensor, "data", _Data(data.__get__, assign_whole), undo)
    patching.wrap(DTensor, "numpy", _of_its_memory, undo)
    for name in ("tolist", "__format__"):
        patching.wrap(DTensor, name, _of_the_whole, undo)
    patching.wrap(DTensor, "__repr__", _shown, undo)
    clip_grad = sys.modules["torch.nn.utils.clip_grad"]
    for owner, name in itertools.product((nn.utils, clip_grad), _CLIPPERS):
        if hasattr(owner, name):
            patching.wrap(owner, name, _whole_result, undo)
    mixed.install(undo)
    patching.wrap(torch, "save", _save_whole, undo, Filing.SHARDS)
    for name in ("trace", "trace_module"):
        patching.wrap(torch.jit, name, _export_whole, undo, Exporting.SHARDS)
    later = undo.enter_context(ExitStack())  # for what the script imports later
    for module in ("torch.onnx", "torch.export"):
        later.callback(after_import(module, functools.partial(_in_module, later)))
    refusal.at_failure.append(explain)
    undo.callback(refusal.at_failure.remove, explain)


def _assign(assign: Any, tensor: Any, value: Any) -> None:
    """Make a tensor the data of a shard, where the script assigns ``parameter.data``.

    torch would put it beside what FSDP gathers, and it would never be used.

    Raises:
        SystemExit: ``fsdp-data`` if it has another shape or type.
    """
    COPIES.settle([tensor, value])
    COPIES.forget(tensor)
    owner: Any = mixed.OWNERS.get(id(tensor), lambda: None)()
    if owner is None or owner.sharded_param is not tensor:
        cut = cut_like(value, tensor)
        assign(tensor, cut)
        tensor._local_tensor = cut.detach().to_local()
        if cut is not value:  # such as a whole tensor for that of a gradient
            COPIES.adopt(tensor, value)
        return
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        refuse(data_error(value, tensor))
    value = value.detach()
    if hasattr(value, "placements"):
        value = value.redistribute(tensor.device_mesh, tensor.placements)
    else:
        COPIES.adopt(tensor, value)
    tensor._local_tensor = cut_like(value, tensor).to_local().contiguous()
    owner.reset_sharded_param()


class _Data(property):
    """`Tensor.data`, whose getter torch hands to ``__torch_function__``: it has a name."""

    __name__ = "data"


def _assign_whole(assign: Any, tensor: Tensor, value: Any) -> None:
    """Make a shard's whole tensor the data of a whole one; torch doesn't check and would crash."""
    assign(tensor, COPIES.share(value) if hasattr(value, "placements") else current(value))


def _number(_operator: Any, args: tuple[Any, ...], _kwargs: Any) -> Any:
    return whole_of(args[0]).item()


def _of_the_whole(original: Any) -> Any:
    @functools.wraps(original)
    def method(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        whole: Any = whole_of(tensor.detach())
        return getattr(whole, original.__name__)(*args, **kwargs)

    return method


def _of_its_memory(original: Any) -> Any:
    @functools.wraps(original)
    def numpy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and tensor.requires_grad:
            return original(tensor, *args, **kwargs)  # torch's error
        return COPIES.share(tensor).numpy(*args, **kwargs)

    return numpy


def _shown(original: Any) -> Any:
    """Show whole tensors, but not in a traceback or a debugger, which one rank alone may have."""

    @functools.wraps(original)
    def __repr__(tensor: Any, *args: Any, **kwargs: Any) -> str:  # noqa: N807
        frame: Any = sys._getframe(1)
        while frame.f_code.co_filename.startswith(own_prefixes()) and frame.f_back is not None:
            frame = frame.f_back
        if frame.f_globals.get("__name__") in ("bdb", "pdb", "traceback"):
            return original(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        whole: Any = whole_of(tensor.detach())
        if isinstance(tensor, nn.Parameter):
            return repr(nn.Parameter(whole, tensor.requires_grad))
        if tensor.grad_fn is None:
            return repr(whole.requires_grad_(tensor.requires_grad))
        lines, name = repr(whole)[:-1], f"grad_fn=<{type(tensor.grad_fn).__name__}>)"
        fits = len(lines.rpartition("\n")[2]) + len(name) < _LINE
        return lines + (", " if fits else ",\n       ") + name

    return __repr__


def _save_whole(original: Any) -> Any:
    @functools.wraps(original)
    def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Every rank, before one of them writes: to put tensors together takes all.
        whole = mixed.whole_modules(map_tensors(obj, whole_of))
        return original(whole, *args, **kwargs)

    return save


def _in_module(undo: ExitStack, module: Any) -> None:
    patching.wrap(module, "export", _export_whole, undo)


def _export_whole(original: Any) -> Any:
    """Export whole copies of sharded modules, whose own calls would gather parameters."""

    def whole(value: Any) -> Any:
        if not (isinstance(value, nn.Module) and is_sharded(value)):
            return value
        COPIES.tell(
            f"{original.__name__} was given a copy of {name_of(value)}, which isn't trained with it"
        )
        return mixed.whole_modules(value)

    @functools.wraps(original)
    def export(*args: Any, **kwargs: Any) -> Any:
        return original(*map(whole, args), **{k: whole(v) for k, v in kwargs.items()})

    return export


def _whole_result(original: Any) -> Any:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return whole_of(original(*args, **kwargs))

    return function
