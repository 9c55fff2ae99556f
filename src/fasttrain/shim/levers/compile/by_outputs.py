"""Takes gradients by outputs of compiled calls from calls that are made again without compilation.

A compiled graph knows no way from one of its outputs to another that was computed from it, as from
features to scores. So what the script asks for by such an output is asked of the same output of a
repeated call (`repeated.py`): before its backward pass, so that nothing is lost.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.dynamo import pass_over
from fasttrain.shim.hooks.gradients import (
    CASTS,
    COMPLETE,
    Branch,
    edge_of,
    hook_lifted,
    is_lifted,
    retain_lifted,
)
from fasttrain.shim.hooks.gradients import INPUTS as WANTED
from fasttrain.shim.hooks.seams import Hooking, Passing
from fasttrain.shim.levers.compile.repeated import INPUTS, Repeated


def take_by_outputs(undo: ExitStack) -> None:
    """Replace what takes gradients by tensors."""
    patching.wrap(Tensor, "register_hook", _hook_repeated, undo, Hooking.REPEATED)
    patching.wrap(Tensor, "retain_grad", _retain_repeated, undo, Hooking.REPEATED)
    for chain, of_compiled in ((COMPLETE, _edge_repeated), (CASTS, _cast_from)):
        chain.append(of_compiled)
        undo.callback(chain.remove, of_compiled)
    if hasattr(torch.autograd, "_engine_run_backward"):
        patching.wrap(
            torch.autograd, "_engine_run_backward", _take_repeated, undo, Passing.REPEATED
        )


def _end(tensor: Any) -> tuple[Any, int]:
    """Return the node of a tensor or an edge, and which of its outputs it is."""
    if isinstance(tensor, Tensor):
        return tensor.grad_fn, tensor.output_nr
    return tensor.node, tensor.output_nr


def _repeated_for(tensor: Any) -> Repeated | None:
    """Return the repeated call that has the gradients by a tensor; None if it needs none."""
    node, index = _end(tensor)
    if node is None or torch.compiler.is_compiling():
        return None
    inputs = getattr(node, INPUTS, None)
    if inputs is not None:
        repeated: Repeated | None = inputs.compiled.repeated_for(node, inputs, index)
        return repeated
    is_view = isinstance(tensor, Tensor) and tensor._is_view()
    base, of_base = node.next_functions[0] if is_view and node.next_functions else (None, 0)
    if (inputs := getattr(base, INPUTS, None)) is not None:
        inputs.compiled.tell_of_view(base, of_base)
    return None


def _edge_repeated(edge: Any) -> Any:
    """Return the edge at which gradients by one of a compiled call meet; None if it needs none."""
    repeated = _repeated_for(edge)
    return edge_of(repeated.outputs[edge.output_nr]) if repeated else None


def _cast_from(tensor: Tensor) -> Any:
    node: Any = tensor.grad_fn
    inputs = getattr(node, INPUTS, None)
    return inputs and inputs.compiled.cast_from(node, inputs, tensor.output_nr)


def _hook_repeated(original: Any) -> Any:
    on_repeated = hook_lifted(original)

    @functools.wraps(original)
    def register_hook(tensor: Tensor, hook: Any) -> Any:
        if (repeated := _repeated_for(tensor)) is None:
            several = hasattr(tensor.grad_fn, INPUTS)
            return original(tensor, _where_defined(hook) if several else hook)
        return on_repeated(repeated.outputs[tensor.output_nr], hook)

    pass_over(register_hook)
    return register_hook


def _where_defined(hook: Any) -> Any:
    """Return a hook that isn't called in passes through other outputs of the same node."""

    @functools.wraps(hook)
    def on_gradient(gradient: Tensor | None) -> Any:
        return None if gradient is None else hook(gradient)

    return on_gradient


def _retain_repeated(original: Any) -> Any:
    on_repeated = retain_lifted(original)

    @functools.wraps(original)
    def retain_grad(tensor: Tensor) -> None:
        repeated = None if tensor.retains_grad else _repeated_for(tensor)
        original(tensor)
        if repeated is not None:
            on_repeated(repeated.outputs[tensor.output_nr])
            repeated.retained.append((tensor.output_nr, weakref.ref(tensor)))

    pass_over(retain_grad)
    return retain_grad


def _take_repeated(original: Any) -> Any:
    @functools.wraps(original)
    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = args[WANTED] if len(args) > WANTED else ()
        repeated = [_repeated_for(tensor) for tensor in wanted]
        if not any(repeated):
            return original(outputs, *args, **kwargs)
        if not kwargs.get("accumulate_grad"):
            return _gradients(original, repeated, outputs, *args)
        seeds, _, create = args[:WANTED]
        some = [(t, one) for t, one in zip(wanted, repeated, strict=True) if one]
        tensors, calls = zip(*some, strict=True)
        found = _gradients(original, calls, outputs, seeds, True, create, tensors, True)  # noqa: FBT003
        if others := tuple(t for t, one in zip(wanted, repeated, strict=True) if not one):
            original(outputs, *args[:WANTED], others, *args[WANTED + 1 :], **kwargs)
        for tensor, gradient in zip(tensors, found, strict=True):
            if gradient is not None:
                tensor.retain_grad()  # as torch does
                tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient
        return ()

    pass_over(run)
    return run


def _gradients(
    original: Any, repeated: Sequence[Repeated | None], outputs: Any, *args: Any
) -> tuple[Tensor | None, ...]:
    """Return gradients as ``torch.autograd.grad`` does, some by outputs of repeated calls.

    Autograd reads these where the compiled function runs. So it is asked for a gradient by
    something before that function, and a hook keeps the one by the output.
    """
    seeds, retain, create, wanted, allow_unused = args
    kept: dict[int, Tensor] = {}
    asked = []
    with ExitStack() as undo:
        for at, (tensor, call) in enumerate(zip(wanted, repeated, strict=True)):
            if call is None:
                asked.append(tensor)
                continue
            node, index = _end(tensor)
            sources = (source for source in node.next_functions if source[0] is not None)
            asked.append(torch.autograd.graph.GradientEdge(*next(sources)))
            _keep(kept, at, call.outputs[index], undo)
        found = original(outputs, seeds, retain, create, tuple(asked), True)  # noqa: FBT003
    result = tuple(kept.get(at) if one else found[at] for at, one in enumerate(repeated))
    if not allow_unused and any(gradient is None for gradient in result):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph."
            " Set allow_unused=True if this is the desired behavior."
        )
    return result


def _keep(kept: dict[int, Tensor], at: int, output: Tensor, undo: ExitStack) -> None:
    """Have a backward pass keep the gradient by an output, in its precision."""
    branch = Branch(output) if is_lifted(output) else None
    node, index, *_ = edge_of(output)

    def on_gradients(grads: tuple[Tensor | None, ...]) -> None:
        if (gradient := grads[index]) is not None:
            kept[at] = branch.whole(gradient) if branch else gradient

    undo.callback(node.register_prehook(on_gradients).remove)
    if branch:
        undo.callback(branch.leave)
