"""Computes gradients of compiled graphs that ``torch.compile`` gets wrong, or doesn't support.

All outputs of a compiled graph come from one node of the autograd graph, and second derivatives of
it there are none. So these differ from eager ones (torch 2.13):

- A backward pass with ``create_graph=True`` runs, and the next one raises "torch.compile with
  aot_autograd does not currently support double backward".
- A pass that starts from some of the outputs alone gives zeros, not None, to what only the others
  depend on. Optimizers then apply weight decay and momentum to it: pytorch#131794.
- It also frees what a pass through the others needs, even if these have nothing in common with the
  first.
- A batch of gradients, by ``torch.vmap`` or ``is_grads_batched=True``, raises.
- A gradient by an output (``torch.autograd.grad``, ``retain_grad``, ``register_hook``) lacks what
  comes through other outputs that were computed from it: pytorch#132929.

Here a compiled function keeps its inputs until its backward pass. Where it isn't enough to replace
zeros by None, the forward pass is repeated eagerly, from dynamo's graph of torch operations, and
that is differentiated. The root runs eagerly from then on, which is faster than to do both.

Not covered, so that all is torch's own: graphs on tensor subclasses, and graphs that change an
input in place which requires a gradient. On GPUs the repeated forward pass draws other dropout
masks.

Source: ``torch/_functorch/_aot_autograd/runtime_wrappers.py`` of torch 2.13: ``CompiledFunction``,
and ``fn_prepped_for_autograd`` for what it returns.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.gradients import cast_for_script, made_by, mark_lifted

Asked = Callable[[str], None]
ASKED = "_fasttrain_asked"
INPUTS = "_fasttrain_inputs"
REPEATED = "_fasttrain_repeated"
# Why a root runs eagerly from then on; with the script's line.
SECOND = "second derivatives (create_graph=True at {}) can't be compiled"
APART = "a backward pass through some of its outputs alone (at {}) can't be compiled"
INNER = "gradients by one of its outputs (at {}) can't be compiled"
BATCHED = "a batch of gradients (at {}) can't be compiled"
LACKING = (
    "gradients by one of its outputs (at {}) can't be compiled; in this call they lack what comes"
    " through its other outputs"
)
ZEROS = (
    "a backward pass through some of its outputs alone (at {}) can't be compiled; in this one, what"
    " the others depend on had gradients of zeros, not None"
)

# Autograd nodes whose gradients are 0 where the gradient that they get is 0, whatever the numbers:
# others may multiply it by an infinite derivative, which gives NaN, where eager autograd doesn't
# run them at all.
_FINITE = frozenset(
    (
        "AdaptiveAvgPool2D", "Add", "Addmm", "AvgPool2D", "Bmm", "Cat", "Clone", "Convolution",
        "CudnnBatchNorm", "Embedding", "Expand", "Gelu", "Index", "LeakyRelu", "LogSoftmax",
        "MaxPool2DWithIndices", "Mean", "Mm", "Mul", "NativeBatchNorm", "NativeDropout",
        "NativeGroupNorm", "NativeLayerNorm", "Neg", "Permute", "Relu", "Select", "Sigmoid",
        "Silu", "Slice", "Softmax", "Split", "Squeeze", "Stack", "Sub", "Sum", "T", "Tanh",
        "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "UpsampleBilinear2D",
        "UpsampleNearest2D", "View",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where an output of a graph comes from.

    Attributes:
        inputs: Indices of the inputs that get a gradient from it.
        nodes: The autograd nodes that a backward pass from it runs, but those of inputs.
        meeting: The node at which all gradients by the output meet; None if it is an input, or the
            cast of one.
    """

    inputs: frozenset[int]
    nodes: frozenset[Any]
    meeting: Any = None


@dataclass(frozen=True, slots=True)
class _Graph:
    """A graph of torch operations that was compiled.

    Attributes:
        run: Runs it eagerly.
        meta: torch's metadata of its inputs and outputs.
        autocast: Device type, dtype, and whether autocast was on when it was traced.
    """

    run: Callable[..., Any]
    meta: Any
    autocast: tuple[str, torch.dtype, bool]
    _untouched: dict[tuple[int, ...], frozenset[int] | None] = field(default_factory=dict)
    _inner: dict[int, bool] = field(default_factory=dict)

    @property
    def repeatable(self) -> bool:
        """True if its inputs can be kept, and it has no others."""
        infos, graph = self.meta.input_info, getattr(self.run, "graph", None)
        outright = not any(info.mutates_data and info.requires_grad for info in infos)
        inputs = [node for node in getattr(graph, "nodes", ()) if node.op == "placeholder"]
        return graph is not None and outright and len(inputs) == len(infos)

    @property
    def changed_and_read(self) -> frozenset[int]:
        """Indices of inputs that the graph changes in place, and whose values it uses.

        Not of BatchNorm's statistics and its count in training, which are only updated.
        """
        graph = getattr(self.run, "graph", None)
        inputs = [node for node in getattr(graph, "nodes", ()) if node.op == "placeholder"]
        changed = zip(inputs, self.meta.input_info, strict=False)
        return frozenset(
            index
            for index, (node, info) in enumerate(changed)
            if info.mutates_data and not all(_only_updates(user, node) for user in node.users)
        )

    @property
    def _output_nodes(self) -> Sequence[Any]:
        (returned,) = next(node for node in _nodes(self.run) if node.op == "output").args
        return tuple(returned)

    @property
    def differentiable_twice(self) -> bool:
        """True if second derivatives of its operations are right."""
        return not any(map(_is_custom_function, _nodes(self.run)))

    @property
    def differentiable_outputs(self) -> list[int]:
        """Indices of what `CompiledFunction` returns that may get a gradient."""
        meta = self.meta
        changed = [meta.input_info[index] for index in meta.mutated_inp_runtime_indices]
        returned = [
            *(info.mutates_data and info.requires_grad for info in changed),
            *(
                info.requires_grad and index not in meta.aliased_out_indices
                for index, info in enumerate(meta.output_info)
            ),
        ]
        bases = range(len(returned), meta.num_forward_returns)
        return [*(index for index, wanted in enumerate(returned) if wanted), *bases]

    @property
    def bases(self) -> frozenset[int]:
        """Indices of what `CompiledFunction` returns of which outputs of the graph are views.

        Source: ``AliasOfIntermediateHandler`` in ``runtime_wrappers.py`` of torch 2.13
        """
        infos, changed = self.meta.output_info, len(self.meta.mutated_inp_runtime_indices)
        outputs = {"alias_of_intermediate_base_is_user_output": changed}
        appended = changed + len(infos)
        return frozenset(
            outputs.get(info.output_type.name, appended) + info.base_idx
            for info in infos
            if info.output_type.name.startswith("alias_of_intermediate")
        )

    def repeat(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of `CompiledFunction`, with a graph; the inputs stay unchanged."""
        given = [
            value.clone() if info.mutates_data or info.mutates_metadata else value
            for value, info in zip(inputs, self.meta.input_info, strict=True)
        ]
        device, dtype, enabled = self.autocast
        with torch.enable_grad(), torch.autocast(device, dtype, enabled):
            outputs = list(self.run(*given))
        for output, node in zip(outputs, self._output_nodes, strict=True):
            if _wants_gradient(output) and cast_for_script(node):
                mark_lifted(output)
        changed = [given[index] for index in self.meta.mutated_inp_runtime_indices]
        kinds = [info.output_type.name for info in self.meta.output_info]
        as_base = "alias_of_intermediate_save_as_output"
        bases = [o._base for o, kind in zip(outputs, kinds, strict=True) if kind == as_base]
        return [*changed, *outputs, *bases]

    def untouched(
        self, inputs: Sequence[Any], given: Sequence[int], missing: Sequence[int]
    ) -> frozenset[int] | None:
        """Return the inputs that get no gradient in a pass through some outputs alone.

        Args:
            inputs: Those of a call, of which only shapes and types count.
            given: The outputs that the pass starts from.
            missing: The other ones.

        Returns:
            Indices of inputs. None if it isn't enough to have zeros for the missing outputs: a
            later pass may go through them, or zeros could become NaN, or it can't be known.
        """
        key = tuple(missing)
        if key not in self._untouched:
            try:
                self._untouched[key] = _untouched(self._origins(inputs), given, missing)
            except Exception:  # noqa: BLE001 - the forward pass is repeated with its real inputs
                self._untouched[key] = None
        return self._untouched[key]

    def inner(self, inputs: Sequence[Any], index: int) -> bool:
        """Return whether other outputs are computed from one."""
        if index not in self._inner:
            try:
                self._inner[index] = _inner(self._origins(inputs), index)
            except Exception:  # noqa: BLE001 - as if it were so
                self._inner[index] = True
        return self._inner[index]

    def cast_from(self, inputs: Sequence[Any], index: int) -> int | None:
        """Return which of the tensors among the inputs an output is cast from for the script."""
        at = index - len(self.meta.mutated_inp_runtime_indices)
        node = self._output_nodes[at] if 0 <= at < len(self._output_nodes) else None
        if node is None or not cast_for_script(node) or node.args[0].op != "placeholder":
            return None
        places = [other for other in _nodes(self.run) if other.op == "placeholder"]
        before = inputs[: places.index(node.args[0])]
        return sum(isinstance(value, Tensor) for value in before)

    def _origins(self, inputs: Sequence[Any]) -> list[_Origin | None]:
        """Return where each output comes from, by a forward pass without numbers or memory."""
        subclasses: Any = importlib.import_module("torch._subclasses")
        with subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            fakes = [
                torch.empty_strided(
                    value.shape,
                    value.stride(),
                    dtype=value.dtype,
                    device=value.device,
                    requires_grad=value.requires_grad,
                )
                if isinstance(value, Tensor)
                else value
                for value in inputs
            ]
            outputs = self.repeat(fakes)
        at = {id(value): index for index, value in enumerate(fakes)}
        return [_origin(output, at) if _wants_gradient(output) else None for output in outputs]


def _origin(output: Tensor, at: dict[int, int]) -> _Origin:
    if output.grad_fn is None:
        return _Origin(frozenset([at[id(output)]]), frozenset())
    inputs: set[int] = set()
    nodes: set[Any] = set()
    waiting: list[Any] = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in nodes:
            continue
        if hasattr(node, "variable"):  # accumulates the gradient of an input
            inputs.add(at[id(node.variable)])
        else:
            nodes.add(node)
            waiting += (source for source, _ in node.next_functions)
    meeting = made_by(output)
    return _Origin(frozenset(inputs), frozenset(nodes), meeting if meeting in nodes else None)


def _untouched(
    origins: Sequence[_Origin | None], given: Sequence[int], missing: Sequence[int]
) -> frozenset[int] | None:
    used = [origin for index in given if (origin := origins[index]) is not None]
    run = frozenset[Any]().union(*(origin.nodes for origin in used))
    reached = frozenset[int]().union(*(origin.inputs for origin in used))
    others = [origin for index in missing if (origin := origins[index]) is not None]
    for origin in others:
        # Eagerly, too, a later pass through it must fail, because this one has freed a part of it.
        if not any(map(_saves, origin.nodes & run)):
            return None
        if not all(map(_is_finite, origin.nodes - run)):
            return None
    return frozenset[int]().union(*(origin.inputs for origin in others)) - reached


def _inner(origins: Sequence[_Origin | None], index: int) -> bool:
    asked, others = origins[index], [o for at, o in enumerate(origins) if o and at != index]
    if asked is None or asked.meeting is None:
        return False
    return any(asked.meeting in other.nodes for other in others)


def _is_finite(node: Any) -> bool:
    operation, _, overload = node.name().rpartition("Backward")
    return overload.isdigit() and operation in _FINITE


def _saves(node: Any) -> bool:
    """True if a backward pass frees tensors of this node."""
    if hasattr(node, "saved_tensors"):  # a `torch.autograd.Function`
        return bool(node.saved_tensors)
    names = (name for name in dir(node) if name.startswith("_saved_"))
    return any(isinstance(getattr(node, name), Tensor) for name in names)


def _nodes(run: Any) -> Iterator[Any]:
    """Yield the nodes of a graph and of those inside it."""
    for part in Module.modules(run) if isinstance(run, Module) else (run,):
        yield from getattr(getattr(part, "graph", None), "nodes", ())


def _only_updates(user: Any, changed: Any) -> bool:
    """True if an operation of dynamo's graph changes an input, and nothing depends on its value."""
    if user.target == "add_" and user.args[0] is changed:
        return not user.users and changed not in user.args[1:]
    if user.target is not torch.nn.functional.batch_norm:
        return False
    given = dict(zip(_BATCH_NORM, user.args, strict=False)) | user.kwargs
    others = [value for name, value in given.items() if not name.startswith("running")]
    return given.get("training") is True and all(value is not changed for value in others)


# The arguments of `torch.nn.functional.batch_norm`.
_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training")


def _is_custom_function(node: Any) -> bool:
    """True if a node is an autograd function of the script's.

    Dynamo's graph has its backward with saved tensors that are connected to nothing, and without
    a sign of `once_differentiable`: a second derivative of it would be wrong, without an error.

    Source: torch 2.13, ``torch/_functorch/autograd_function.py``, AutogradFunctionApply
    """
    return getattr(node.target, "__name__", "") == "autograd_function_apply"


def call_custom_functions(undo: ExitStack) -> None:
    """Break the graph where an autograd function of the script's is called.

    It then runs as the script has it, and what is compiled around it can be differentiated again.
    Not done everywhere, because models with such functions lose speed by it.
    """
    variables: Any = importlib.import_module("torch._dynamo.variables.higher_order_ops")
    exc: Any = importlib.import_module("torch._dynamo.exc")
    variable = getattr(variables, "AutogradFunctionApplyVariable", None)
    if variable is None or not hasattr(exc, "unimplemented"):  # an older torch
        return

    def call_function(*_: Any) -> Any:
        exc.unimplemented(
            gb_type="torch.autograd.Function where second derivatives may be taken",
            context="",
            explanation="Only the function itself can be differentiated twice.",
            hints=[],
        )

    patching.put(variable, "call_function", call_function, undo)


class _Inputs:
    """The inputs of one call, kept until its backward pass."""

    __slots__ = ("_random_state", "_versions", "compiled", "values")

    def __init__(self, values: Sequence[Any], compiled: _Backward) -> None:
        self.values: Sequence[Any] = values
        if compiled.apart:
            self.values = [v.clone() if i in compiled.apart else v for i, v in enumerate(values)]
        self.compiled = compiled
        self._versions = _versions(self.values)
        self._random_state = torch.default_generator.get_state()

    def repeat(self, graph: _Graph) -> Repeated:
        """Return the call, made again without compilation.

        Raises:
            RuntimeError: torch's own error if an input was changed in place since the call.
        """
        mutated = [info.mutates_data for info in graph.meta.input_info]
        for before, after, own in zip(self._versions, _versions(self.values), mutated, strict=True):
            if before != after and not own:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by"
                    f" an inplace operation: is at version {after}; expected version {before}"
                )
        # Views, so that an input computed from another one counts as independent of it.
        with _outside_vmap(), torch.enable_grad():
            apart = [v.view_as(v) if _wants_gradient(v) else v for v in self.values]
        with _outside_vmap(), torch.random.fork_rng(devices=[]):
            torch.default_generator.set_state(self._random_state)
            return Repeated(apart, graph.repeat(apart))


@dataclass(frozen=True, slots=True)
class Repeated:
    """A call that was made again without compilation.

    Attributes:
        inputs: Its inputs.
        outputs: Its outputs, those of `CompiledFunction`.
        retained: Indices of outputs that retain their gradients, each with the script's tensor.
    """

    inputs: list[Any]
    outputs: list[Any]
    retained: list[tuple[int, weakref.ref[Tensor]]] = field(default_factory=list)

    def differentiate(self, grads: Sequence[Any], *, twice: bool) -> tuple[Any, ...]:
        """Return the gradients by the inputs, which can be differentiated again if ``twice``."""
        pairs = [
            (output, grad)
            for output, grad in zip(self.outputs, grads, strict=False)
            if _wants_gradient(output) and grad is not None
        ]
        wanted = [value for value in self.inputs if _wants_gradient(value)]
        found = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                retain_graph=True,  # for passes through other outputs
                create_graph=twice,
                allow_unused=True,
            )
        )
        for index, ref in self.retained:
            if (tensor := ref()) is not None:
                tensor.grad = self.outputs[index].grad
        return tuple(next(found) if _wants_gradient(value) else None for value in self.inputs)


def repair_gradients(caller: Callable[[], Asked], undo: ExitStack) -> None:
    """Have graphs that are compiled from now on return the gradients that they have eagerly.

    Args:
        caller: Called when a graph runs: roots of one class share those between graph breaks.
            Returns a function that is called with a reason when the root has to run eagerly from
            then on.
        undo: Takes the inverse.
    """
    common: Any = importlib.import_module("torch._dynamo.backends.common")
    wrappers: Any = importlib.import_module("torch._functorch._aot_autograd.runtime_wrappers")
    if not hasattr(common, "aot_module_simplified"):  # an older torch
        return
    compile_graph, wrap = common.aot_module_simplified, wrappers.RuntimeWrapper.post_compile
    under_way: list[tuple[Any, tuple[str, torch.dtype, bool]]] = []

    @functools.wraps(compile_graph)
    def aot_module_simplified(graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        under_way.append((graph, _autocast_for(inputs)))
        try:
            return compile_graph(graph, inputs, *args, **kwargs)
        finally:
            under_way.pop()

    @functools.wraps(wrap)
    def post_compile(self: Any, compiled: Any, *args: Any, **kwargs: Any) -> Any:
        function: Any = getattr(compiled, "__self__", None)  # of `CompiledFunction.apply`
        if under_way and getattr(function, "maybe_subclass_metadata", self) is None:
            run, autocast = under_way[-1]
            _extend(function, _Graph(run, function.metadata, autocast), caller)
        return wrap(self, compiled, *args, **kwargs)

    patching.put(common, "aot_module_simplified", aot_module_simplified, undo)
    patching.put(wrappers.RuntimeWrapper, "post_compile", post_compile, undo)


def _extend(function: Any, graph: _Graph, caller: Callable[[], Asked]) -> None:
    """Have a compiled autograd function keep its inputs, and repeat itself if necessary."""
    boxed = getattr(function, "boxed_grads_call", False)  # as of torch 2.13; else one by one
    plain_forward, plain_backward = function.forward, function.backward

    def plain(ctx: Any, grads: list[Any]) -> Any:
        return plain_backward(ctx, grads) if boxed else plain_backward(ctx, *grads)

    compiled = _Backward(graph, plain)
    several = len(compiled.outputs) > 1
    if not (graph.repeatable or several):
        return
    keeps = graph.repeatable

    def forward(ctx: Any, *inputs: Any) -> Any:
        setattr(ctx, ASKED, caller())
        if keeps:
            setattr(ctx, INPUTS, _Inputs(inputs, compiled))
        returned = plain_forward(ctx, *inputs)
        if several:
            ctx.set_materialize_grads(False)
        return returned

    def backward(ctx: Any, *grads: Any) -> Any:
        return compiled.run(ctx, grads[0] if boxed else list(grads))

    function.forward, function.backward = staticmethod(forward), staticmethod(backward)


class _Backward:
    """The backward pass of a compiled autograd function.

    Attributes:
        outputs: Indices of the outputs that may get a gradient.
        apart: Indices of the inputs of which a call is repeated with copies, since it changes them.
    """

    def __init__(self, graph: _Graph, plain: Callable[..., Any]) -> None:
        self._graph, self._plain = graph, plain
        self._twice, self._repeatable = graph.differentiable_twice, graph.repeatable
        self.outputs, self.apart = graph.differentiable_outputs, graph.changed_and_read

    def run(self, ctx: Any, given: list[Any]) -> Any:
        """Return the gradients by the inputs."""
        twice = torch.is_grad_enabled()
        inputs = getattr(ctx, INPUTS, None)
        missing = [index for index in self.outputs if given[index] is None]
        repeated = getattr(ctx, REPEATED, None)
        if repeated is None and inputs is not None:
            repeated = self._repeat(ctx, inputs, given, missing, twice=twice)
        if repeated is not None:
            return repeated.differentiate(given, twice=twice)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            setattr(ctx, INPUTS, None)
        if not missing:
            return self._plain(ctx, given)
        return self._run_with_zeros(ctx, inputs, given, missing)

    def repeated_for(self, ctx: Any, inputs: _Inputs, index: int) -> Repeated | None:
        """Return the call made again, for gradients by an output; None if they are right anyway."""
        repeated: Repeated | None = getattr(ctx, REPEATED, None)
        if repeated is None and self._graph.inner(inputs.values, index):
            getattr(ctx, ASKED)(INNER)
            repeated = inputs.repeat(self._graph)
            setattr(ctx, REPEATED, repeated)
        return repeated

    def cast_from(self, ctx: Any, inputs: _Inputs, index: int) -> Any:
        """Return the edge of the input that an output is cast from for the script, if it is."""
        at = self._graph.cast_from(inputs.values, index)
        return None if at is None else ctx.next_functions[at]

    def tell_of_view(self, ctx: Any, base: int) -> None:
        """Have the root run eagerly if a view that the script asks by may be one of its outputs.

        Args:
            ctx: The call's node.
            base: Which of the node's outputs it is a view of.
        """
        if base in self._graph.bases:
            getattr(ctx, ASKED)(LACKING)

    def _repeat(
        self, ctx: Any, inputs: _Inputs, given: list[Any], missing: list[int], *, twice: bool
    ) -> Repeated | None:
        """Repeat the call if the compiled backward pass wouldn't do; return None if it does."""
        if twice and self._twice:
            getattr(ctx, ASKED)(SECOND)
            return inputs.repeat(self._graph)
        batched = _is_batched(given)
        if not batched and (not missing or self._untouched(inputs, missing) is not None):
            return None
        getattr(ctx, ASKED)(BATCHED if batched else APART)
        repeated = inputs.repeat(self._graph)
        setattr(ctx, REPEATED, repeated)  # for passes through the other outputs
        return repeated

    def _untouched(self, inputs: _Inputs, missing: list[int]) -> frozenset[int] | None:
        present = [index for index in self.outputs if index not in missing]
        return self._graph.untouched(inputs.values, present, missing)

    def _run_with_zeros(
        self, ctx: Any, inputs: _Inputs | None, given: list[Any], missing: list[int]
    ) -> Any:
        untouched = self._untouched(inputs, missing) if inputs is not None else None
        for index in missing:
            like = ctx._input_metadata[index]
            given[index] = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        found = self._plain(ctx, given)
        if not self._repeatable:
            getattr(ctx, ASKED)(ZEROS)
        return tuple(None if at in (untouched or ()) else grad for at, grad in enumerate(found))


def _is_batched(grads: Sequence[Any]) -> bool:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    is_batched: Any = torch._C._functorch.is_legacy_batchedtensor
    return any(is_batched(grad) for grad in grads if isinstance(grad, Tensor))


@contextmanager
def _outside_vmap() -> Iterator[None]:
    """Leave vmap in the block, where random numbers are refused or drawn for each of a batch."""
    functorch: Any = importlib.import_module("torch._functorch.pyfunctorch")
    levels = 0  # of the older vmap, which `is_grads_batched=True` uses
    torch._C._vmapmode_increment_nesting()
    while torch._C._vmapmode_decrement_nesting():
        levels += 1
    try:
        with functorch.temporarily_clear_interpreter_stack():
            yield
    finally:
        for _ in range(levels):
            torch._C._vmapmode_increment_nesting()


def _autocast_for(inputs: Sequence[Any]) -> tuple[str, torch.dtype, bool]:
    device = next((value.device.type for value in inputs if isinstance(value, Tensor)), "cpu")
    return device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)


def _versions(values: Sequence[Any]) -> list[int]:
    return [
        value._version if isinstance(value, Tensor) and not value.is_inference() else 0
        for value in values
    ]


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
