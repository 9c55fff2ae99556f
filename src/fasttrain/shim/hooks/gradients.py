"""Where backward passes start, the script's gradient hooks, and gradients of low precision."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import BackwardHook

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.dynamo import pass_over
from fasttrain.shim.hooks.seams import Differentiating, Hooking, Passing

# Reads the arguments of a backward pass as torch does. torch 2.0 has no edges.
_ENDS = (Tensor, getattr(torch.autograd.graph, "GradientEdge", Tensor))


def ends_of(tensors: Any) -> tuple[Any, ...]:
    """Return what a backward pass starts from: tensors, and edges of the autograd graph.

    The script may have an iterator of them, which can be read once only: hand on what this returns.

    Source: ``torch/autograd/__init__.py`` of torch 2.13, ``backward``. An edge is a tuple itself.
    """
    return (tensors,) if isinstance(tensors, _ENDS) else tuple(tensors)


def inputs_of(inputs: Any) -> tuple[Any, ...]:
    """Return what gradients are asked for: tensors and edges, which may be a dict's values.

    Hand on what this returns: the script's ``parameters()`` can be read once only.

    Source: ``torch/autograd/__init__.py`` of torch 2.13, ``grad`` and ``backward``.
    """
    return ends_of(inputs.values() if type(inputs) is dict else inputs)


def named_as(inputs: Any, gradients: tuple[Any, ...]) -> Any:
    """Return gradients as ``torch.autograd.grad`` does: those of a dict have its keys."""
    return dict(zip(inputs, gradients, strict=True)) if type(inputs) is dict else gradients


# Wraps the script's gradient hooks, for levers that pass them changed gradients.


Hook = Callable[..., Any]


def wrap_tensor_hooks(
    name: str, wrap: Callable[[Hook], Hook], undo: ExitStack, place: Hooking
) -> None:
    """Wrap hooks on tensors when they are registered by ``Tensor``'s method of that name."""

    def wrapped(original: Any) -> Any:
        @functools.wraps(original)
        def register(tensor: Tensor, hook: Hook) -> Any:
            return original(tensor, wrap(hook))

        return register

    patching.wrap(Tensor, name, wrapped, undo, place)


def wrap_module_hooks(wrap: Callable[[Hook], Hook], undo: ExitStack, place: Hooking) -> None:
    """Wrap each call's own list of full backward hooks: the module's, which is pickled, stays."""

    def wrapped(original: Any) -> Any:
        @functools.wraps(original)
        def __init__(holder: Any, module: Any, hooks: Any, pre_hooks: Any) -> None:  # noqa: N807
            hooks, pre_hooks = ([wrap(hook) for hook in each] for each in (hooks, pre_hooks))
            original(holder, module, hooks, pre_hooks)

        return __init__

    patching.wrap(BackwardHook, "__init__", wrapped, undo, place)


# Takes a batch of gradients one by one: what splits a call among ranks can't run under vmap.


_GRAD = inspect.signature(torch.autograd.grad)
_BATCHED_AT = list(_GRAD.parameters).index("is_grads_batched")


ONE_BY_ONE = "gradients with is_grads_batched=True are taken one by one, which is slower"


def take_one_by_one(tell: Callable[[str], None], undo: ExitStack) -> None:
    """Have ``torch.autograd.grad(..., is_grads_batched=True)`` do without vmap.

    The results are the same but for rounding; each row takes a backward pass of its own.

    Args:
        tell: Called with a sentence for the receipt when the script does it.
        undo: Takes the inverse.
    """
    make = functools.partial(_one_by_one, tell)
    patching.wrap(torch.autograd, "grad", make, undo, Differentiating.ONE_BY_ONE)


def _one_by_one(tell: Callable[[str], None], original: Any) -> Any:
    @functools.wraps(original)
    def one_by_one(*args: Any, **kwargs: Any) -> Any:
        asked = len(args) > _BATCHED_AT or kwargs.get("is_grads_batched")
        if not asked or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        given = _GRAD.bind(*args, **kwargs)
        given.apply_defaults()
        inputs, vectors = given.arguments["inputs"], given.arguments["grad_outputs"]
        vectors = [vectors] if isinstance(vectors, Tensor) else list(vectors or ())
        rows = next((len(v) for v in vectors if v is not None), 0)
        if not given.arguments["is_grads_batched"] or not rows:
            given.arguments["grad_outputs"] = vectors or None
            return original(*given.args, **given.kwargs)
        tell(ONE_BY_ONE)
        outputs = given.arguments["outputs"]
        given.arguments.update(outputs=ends_of(outputs), inputs=inputs_of(inputs))
        retain = given.arguments["retain_graph"]
        found = []
        for row in range(rows):
            last = row == rows - 1
            given.arguments.update(
                grad_outputs=[None if v is None else v[row] for v in vectors],
                retain_graph=retain if last else True,
                is_grads_batched=False,
            )
            found.append(original(*given.args, **given.kwargs))
        stacked = (
            None if any(one is None for one in of_one_input) else torch.stack(of_one_input)
            for of_one_input in zip(*found, strict=True)
        )
        return named_as(inputs, tuple(stacked))

    pass_over(one_by_one)
    return one_by_one


# Lets the script take gradients with respect to low-precision tensors that it sees in fp32.
#
# What a root returns, and what its modules keep, is cast to fp32 for the script. In the autograd
# graph this cast is a side branch: what the model computes from the tensor doesn't go through it.
# So a gradient by such a tensor, a hook on it and the gradient that it retains have to be those
# of the low-precision tensor, where all branches meet. Without this module no error would show
# the difference: a gradient would lack a part, or a hook would never run.
#
# Source: ``torch/autograd/__init__.py`` of torch 2.13: all backward passes go through
# ``_engine_run_backward``, whose fourth argument after the outputs is ``inputs``. With a torch
# that lacks it, a gradient has the branch's part alone.


# A key in the metadata of the cast's node: it goes when the graph goes, and keeps no tensor alive.
_LIFTED = "fasttrain: cast for the script"
INPUTS = 3  # index of ``inputs`` among the arguments after the outputs


def lift(tensor: Tensor) -> Tensor:
    """Return a low-precision tensor in fp32, marked as a cast for the script."""
    result = tensor.float()
    if result.grad_fn is not None and result is not tensor:
        mark_lifted(result)
        if tensor.retains_grad:  # the model has called retain_grad() on it
            result.retain_grad()
    return result


def mark_lifted(cast: Tensor) -> None:
    """Have gradients by a cast be those of the tensor that was cast."""
    node: Any = cast.grad_fn
    node.metadata[_LIFTED] = True


def cast_for_script(node: Any) -> bool:
    """True if a node of dynamo's graph is the cast that `RootCalls.finish` makes."""
    return bool(node.target == "to" and node.args[1:] == (torch.float32, False, False))


def made_by(tensor: Tensor) -> Any:
    """Return the autograd node at which all gradients by a tensor meet."""
    return edge_of(tensor)[0]


# Each returns what a tensor was cast from for the script, an edge of the autograd graph, or None:
# what is compiled may cast its inputs.
CASTS: list[Callable[[Tensor], Any]] = []


def _cast_from(tensor: Any) -> Any:
    node: Any = tensor.grad_fn if isinstance(tensor, Tensor) else None
    if node is None:
        return None
    if _LIFTED in node.metadata:
        return node.next_functions[0]
    return next((edge for find in CASTS if (edge := find(tensor)) is not None), None)


def is_lifted(tensor: Any) -> bool:
    """True if a tensor was cast for the script, and not changed in place since."""
    return _cast_from(tensor) is not None


def install(undo: ExitStack) -> None:
    """Replace what takes gradients by tensors."""
    if hasattr(torch.autograd, "_engine_run_backward"):
        patching.wrap(torch.autograd, "_engine_run_backward", _watched_passes, undo, Passing.LIFTED)
    patching.wrap(Tensor, "register_hook", hook_lifted, undo, Hooking.LIFTED)
    patching.wrap(Tensor, "retain_grad", retain_lifted, undo, Hooking.LIFTED)


def hook_lifted(original: Any) -> Any:
    """Return `Tensor.register_hook` for lifted tensors, too."""
    return _instead(_hook, original)


def retain_lifted(original: Any) -> Any:
    """Return `Tensor.retain_grad` for lifted tensors, too."""
    return _instead(_retain, original)


def _instead(act: Callable[..., Any], original: Any) -> Any:
    @functools.wraps(original)
    def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not is_lifted(tensor):
            return original(tensor, *args, **kwargs)
        return act(original, tensor, *args, **kwargs)

    return method


# Each returns the edge at which gradients by another edge are complete, or None: what is compiled
# has such edges in a call that is made again.
COMPLETE: list[Callable[[Any], Any]] = []


def edge_of(tensor: Tensor) -> Any:
    """Return the edge at which all gradients by a tensor meet: a node, and its output."""
    meeting = _cast_from(tensor) or (tensor.grad_fn, tensor.output_nr)
    return torch.autograd.graph.GradientEdge(*meeting)


def _complete_edge(tensor: Tensor) -> Any:
    edge = edge_of(tensor)
    found = (complete(edge) for complete in COMPLETE)
    return next((other for other in found if other is not None), edge)


class Branch:
    """The part of a lifted tensor's gradient that comes through the cast; keeps no graph alive."""

    def __init__(self, tensor: Tensor) -> None:
        cast: Any = tensor.grad_fn
        self._index = tensor.output_nr
        self._gradients: list[Tensor] = []
        self._handle = cast.register_prehook(self._note)

    def _note(self, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[self._index]
        self._gradients[:] = [] if gradient is None else [gradient]

    def rest(self, low: Tensor) -> Tensor:
        """Return the part of the edge's gradient that did not come through the cast, in fp32."""
        gradient = low.float()
        for branch in self._gradients:
            rounded = branch.to(low.dtype).float()
            # If the cast overflows, the sum is inf, and the rest can't be known: it counts as 0.
            gradient = torch.where(rounded.isinf(), 0.0, gradient - rounded)
        return gradient

    def whole(self, low: Tensor) -> Tensor:
        """Return the whole gradient in fp32; its part that came through the cast is not rounded."""
        gradient = self.rest(low)
        for branch in self._gradients:
            gradient = gradient + branch
        self.forget()
        return gradient

    def forget(self) -> None:
        """Drop the gradients of the backward pass that is running."""
        self._gradients.clear()

    def leave(self) -> None:
        """Ignore later backward passes."""
        self._handle.remove()


def _hook(_: Any, tensor: Tensor, hook: Hook) -> Any:
    branch = Branch(tensor)
    node, at, *_ = _complete_edge(tensor)

    def on_gradients(gradients: tuple[Tensor | None, ...]) -> Any:
        gradient = gradients[at]
        if gradient is None:
            return None
        shown = branch.whole(gradient)
        result = hook(shown)
        if result is None and not shown._version:
            return None
        # Some hooks change their argument in place, against torch's advice.
        changed = (shown if result is None else result).to(gradient.dtype)
        return (*gradients[:at], changed, *gradients[at + 1 :])

    return node.register_prehook(on_gradients)


def _retain(original: Any, tensor: Tensor) -> None:
    if tensor.retains_grad:
        return
    original(tensor)  # torch retains only the part that comes through the cast
    branch, ref = Branch(tensor), weakref.ref(tensor)
    node, at, *_ = _complete_edge(tensor)

    def on_gradients(gradients: tuple[Tensor | None, ...]) -> None:
        gradient, kept = gradients[at], ref()
        if gradient is not None and kept is not None:
            _add(kept, branch.rest(gradient))
        branch.forget()

    node.register_prehook(on_gradients)


def _add(tensor: Tensor, gradient: Tensor) -> None:
    """Add to the gradient of a non-leaf tensor, out of place as torch does."""
    tensor.grad = gradient.clone() if tensor.grad is None else tensor.grad + gradient


def _watched_passes(original: Any) -> Any:
    @functools.wraps(original)
    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = args[INPUTS] if len(args) > INPUTS else ()
        if not any(map(is_lifted, inputs)):
            return original(outputs, *args, **kwargs)
        branches = [Branch(tensor) if is_lifted(tensor) else None for tensor in inputs]
        take = _accumulate if kwargs.get("accumulate_grad") else _gradients
        try:
            return take(original, branches, outputs, *args, **kwargs)
        finally:
            for branch in filter(None, branches):
                branch.leave()

    pass_over(run)
    return run


def _gradients(
    original: Any, branches: list[Branch | None], outputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Return the gradients by the inputs, as ``torch.autograd.grad`` does."""
    before, inputs, after = args[:INPUTS], args[INPUTS], args[INPUTS + 1 :]
    pairs = list(zip(inputs, branches, strict=True))
    asked = tuple(edge_of(tensor) if branch else tensor for tensor, branch in pairs)
    found = original(outputs, *before, asked, *after, **kwargs)
    return tuple(
        branch.whole(gradient) if branch and gradient is not None else gradient
        for gradient, branch in zip(found, branches, strict=True)
    )


def _accumulate(
    original: Any, branches: list[Branch | None], outputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Add gradients to the inputs, as ``backward(inputs=...)`` does.

    torch can't accumulate at an edge. So a first backward pass returns the gradients by lifted
    tensors, which are added here, and a second one accumulates those by the other inputs.
    """
    before, inputs, after = args[:INPUTS], args[INPUTS], args[INPUTS + 1 :]
    others = tuple(t for t, branch in zip(inputs, branches, strict=True) if not branch)
    seeds, retained, create = before
    earlier = [tensor.grad if tensor.retains_grad else None for tensor in inputs]
    may_be_unused = True  # as torch has it where it accumulates
    found = _gradients(
        original, branches, outputs, seeds, bool(others) or retained, create, inputs, may_be_unused
    )
    if others:
        original(outputs, *before, others, *after, **kwargs)
    for tensor, branch, grad, gradient in zip(inputs, branches, earlier, found, strict=True):
        if branch and gradient is not None:
            tensor.retain_grad()  # as torch does
            tensor.grad = grad  # without what these two backward passes have retained
            _add(tensor, gradient)
    return ()
