"""Repairs faults of torch's compiler that silently give wrong results."""

from __future__ import annotations

import fcntl
import functools
import importlib
import inspect
import os
import signal
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.seams import then

# Part of the keys of torch's compile caches, so that nothing compiled without the repairs is used.
CACHE_TAG = "fasttrain-repairs-1"


def repair(undo: ExitStack) -> None:
    """Install the repairs that the present torch needs."""
    _keep_order_of_mutations(undo)
    _draw_each_time(undo)
    _change_buffers_again(undo)
    with suppress(ImportError):  # torch 2.7
        config: Any = importlib.import_module("torch.compiler.config")
        undo.callback(setattr, config, "cache_key_tag", config.cache_key_tag)
        config.cache_key_tag = f"{config.cache_key_tag}{CACHE_TAG}"


def _keep_order_of_mutations(undo: ExitStack) -> None:
    """Keep a kernel that reads a scattered buffer after the scatter.

    Fusion on the CPU lost this order, and the gradient of relu and max_pool2d after a convolution
    was 0: pytorch#185509. Can go once no supported torch lacks pytorch#185873, as 2.13 does.
    """
    node_type: Any = importlib.import_module("torch._inductor.scheduler").SchedulerNode
    if hasattr(node_type, "recompute_size_and_body"):  # from torch 2.4 on
        make = then(_rename_mutations, even_traced=True)
        patching.wrap(node_type, "recompute_size_and_body", make, undo)


def _rename_mutations(node: Any) -> None:
    renames = getattr(node, "mutation_renames", None)
    if renames:
        node.set_read_writes(node.read_writes.rename(renames))


def _draw_each_time(undo: ExitStack) -> None:
    """Break the graph where a `random.Random` of the script draws numbers.

    Dynamo draws while it traces, so that all later calls of the graph get the same numbers: torch
    2.13, ``torch/_dynamo/variables/misc.py``. The functions of the module `random` are not
    concerned.
    """
    misc: Any = importlib.import_module("torch._dynamo.variables.misc")
    variable = getattr(misc, "RandomVariable", None)
    if variable is None:  # before torch 2.5
        return
    patching.put(variable, "is_supported_random_obj", staticmethod(lambda _: False), undo)


def _change_buffers_again(undo: ExitStack) -> None:
    """Break the graph where activation checkpointing repeats what changes a buffer.

    A checkpoint calls its function once more in the backward pass, so that BatchNorm updates its
    running statistics twice in each step. Compiled, a repetition changes no input of the graph, and
    the statistics in a file and in evaluation would be other ones.

    Source: ``CheckpointHigherOrderVariable`` in ``torch/_dynamo/variables/higher_order_ops.py`` and
    ``SubgraphTracer`` in ``torch/_dynamo/output_graph.py``, torch 2.13.
    """
    variables: Any = importlib.import_module("torch._dynamo.variables.higher_order_ops")
    tracer: Any = importlib.import_module("torch._dynamo.output_graph").SubgraphTracer
    variable = getattr(variables, "CheckpointHigherOrderVariable", None)
    if not (hasattr(variable, "supports_input_mutation") and hasattr(tracer, "has_input_mutation")):
        return  # an older torch
    patching.put(variable, "supports_input_mutation", False, undo)  # noqa: FBT003
    patching.wrap(tracer, "has_input_mutation", _with_statistics, undo)


def _with_statistics(original: Any) -> Any:
    # Versions of tensors, by which dynamo knows what is changed, don't count running statistics.
    @functools.wraps(original)
    def has_input_mutation(tracer: Any) -> Any:
        found = original(tracer)
        name = getattr(tracer.source_target, "__name__", "")
        if name == "tag_activation_checkpoint" and any(map(_updates, tracer.graph.nodes)):
            return type(found)(True, "running statistics are updated")  # noqa: FBT003
        return found

    return has_input_mutation


def _updates(node: Any) -> bool:
    """True if a node of a graph updates running statistics."""
    if node.target not in (F.batch_norm, F.instance_norm):
        return False
    call = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    call.apply_defaults()
    given = call.arguments
    return given["running_mean"] is not None and bool(
        given.get("training") or given.get("use_input_stats")
    )


# Protects the programs in inductor's cache from runs that are killed while they compile.
#
# Compiler and linker write a program under its final name. If they are killed, a truncated
# program, often of 0 bytes, stays there for all later runs, which can't load it and would run
# eagerly. So each program is written under another name first, and truncated ones are removed.
#
# Source: torch/_inductor/cpp_builder.py and codecache.py, torch 2.13. inductor always checks
# ``os.path.exists(builder.get_target_file_path())``, and calls ``build()`` if that is False.


ELF = b"\x7fELF"
ELF_HEADER_BYTES = 64  # of the 64-bit format
PROGRAMS = (".so", ".o")
MENDED = "programs that a killed run had left truncated in the cache were compiled again"


def keep_whole(note: Callable[[str], None], undo: ExitStack) -> None:
    """Have inductor write each program under another name first, and remove truncated ones.

    Args:
        note: Called with a sentence for the receipt if there were truncated ones.
        undo: Takes the inverse.
    """
    with suppress(ImportError):  # before torch 2.4
        builder: Any = importlib.import_module("torch._inductor.cpp_builder").CppBuilder
        parts_removed = functools.partial(_parts_removed, note)
        patching.wrap(builder, "build", _written_whole, undo)
        patching.wrap(builder, "get_target_file_path", parts_removed, undo)


def _written_whole(original: Any) -> Any:
    @functools.wraps(original)
    def build(builder: Any) -> Any:
        target, output = str(builder._target_file), getattr(builder, "_output", "")
        if not (Path(target).is_absolute() and output.endswith(f" {target}")):
            return original(builder)  # built elsewhere, as on a build farm
        part = Path(f"{target}.{os.getpid()}.part")
        builder._output = f"{output.removesuffix(target)}{part}"
        try:
            built = original(builder)
            part.replace(target)
        finally:
            builder._output = output
            part.unlink(missing_ok=True)
        return built

    return build


def _parts_removed(note: Callable[[str], None], original: Any) -> Any:
    @functools.wraps(original)
    def get_target_file_path(builder: Any) -> Any:
        target = original(builder)
        with suppress(OSError):  # usually because it isn't there
            program = Path(target)
            if _cut_short(program) and not _is_open(program):
                program.unlink()
                note(MENDED)
        return target

    return get_target_file_path


def _is_open(path: Path) -> bool:
    """True if a process may have the file open: it is being written, and not truncated.

    Runs without fasttrain use the same cache, and write in place. Linux grants a write lease only
    on a file that is open nowhere else.
    """
    with path.open("rb") as file:
        try:
            # When another process opens the file meanwhile, the kernel sends a signal: SIGURG,
            # which is ignored, and not the default SIGIO, which would kill this process.
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except (OSError, AttributeError):  # it is open, or the system has no leases
            return True
    return False


def _cut_short(path: Path) -> bool:
    """True if a file that a compiler wrote is empty, or an ELF program that lacks its end.

    The section table comes last in a program, and the ELF header holds its offset and size.
    """
    size = path.stat().st_size
    if size == 0 or path.suffix not in PROGRAMS:
        return size == 0
    with path.open("rb") as file:
        header = file.read(ELF_HEADER_BYTES)
    if not header.startswith(ELF):
        return not header.strip(b"\0")  # only zeros; else another system's format
    if len(header) < ELF_HEADER_BYTES:
        return True
    order = "<" if header[5] == 1 else ">"
    (offset,) = struct.unpack_from(f"{order}Q", header, 0x28)
    entry_bytes, entries = struct.unpack_from(f"{order}HH", header, 0x3A)
    return bool(offset == 0 or size < offset + entry_bytes * entries)


# Computes second derivatives of compiled graphs, which torch.compile doesn't support.
#
# A backward pass with ``create_graph=True`` runs through a graph that is already compiled, and
# torch raises in the next backward pass: "torch.compile with aot_autograd does not currently
# support double backward". Here a compiled function keeps its inputs until its backward pass. If
# that is to be differentiated again, it repeats the forward eagerly, from dynamo's graph of torch
# operations, and differentiates that. The root runs eagerly from then on, which is faster than to
# do both.
#
# Not covered, so that torch raises its error: graphs on tensor subclasses, and graphs that change
# an input in place which requires a gradient. On GPUs the repeated forward draws other dropout
# masks.
#
# Source: ``torch/_functorch/_aot_autograd/runtime_wrappers.py`` of torch 2.13:
# ``CompiledFunction``, and ``fn_prepped_for_autograd`` for what it returns.


Asked = Callable[[], None]
INPUTS = "_fasttrain_inputs"


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

    @property
    def repeatable(self) -> bool:
        """True if its inputs can be kept, it has no others, and all of it differentiates twice."""
        if any(map(_is_custom_function, _nodes(self.run))):
            return False
        infos = self.meta.input_info
        outright = not any(info.mutates_data and info.requires_grad for info in infos)
        inputs = [node for node in getattr(self.run, "graph").nodes if node.op == "placeholder"]  # noqa: B009
        return outright and len(inputs) == len(infos)

    def repeat(self, inputs: Sequence[Any], random_state: Tensor) -> list[Any]:
        """Return the outputs of `CompiledFunction`, with a graph; the inputs stay unchanged."""
        given = [
            value.clone() if info.mutates_data or info.mutates_metadata else value
            for value, info in zip(inputs, self.meta.input_info, strict=True)
        ]
        device, dtype, enabled = self.autocast
        with torch.random.fork_rng(devices=[]), torch.autocast(device, dtype, enabled):
            torch.set_rng_state(random_state)
            outputs = list(self.run(*given))
        changed = [given[index] for index in self.meta.mutated_inp_runtime_indices]
        kinds = [info.output_type.name for info in self.meta.output_info]
        as_base = "alias_of_intermediate_save_as_output"
        bases = [o._base for o, kind in zip(outputs, kinds, strict=True) if kind == as_base]
        return [*changed, *outputs, *bases]


def _nodes(run: Any) -> Iterator[Any]:
    """Yield the nodes of a graph and of those inside it."""
    for part in Module.modules(run) if isinstance(run, Module) else (run,):
        yield from getattr(getattr(part, "graph", None), "nodes", ())


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
    """The inputs of one call, kept for a second derivative."""

    __slots__ = ("_random_state", "_values", "_versions")

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values
        self._versions = _versions(values)
        self._random_state = torch.get_rng_state()

    def differentiate(self, graph: _Graph, grads: Sequence[Any]) -> tuple[Any, ...]:
        """Return the gradients by the inputs, which can be differentiated again.

        Raises:
            RuntimeError: torch's own error if an input was changed in place since the call.
        """
        mutated = [info.mutates_data for info in graph.meta.input_info]
        for before, after, own in zip(
            self._versions, _versions(self._values), mutated, strict=True
        ):
            if before != after and not own:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by"
                    f" an inplace operation: is at version {after}; expected version {before}"
                )
        # Views, so that an input computed from another one counts as independent of it.
        apart = [v.view_as(v) if _wants_gradient(v) else v for v in self._values]
        outputs = graph.repeat(apart, self._random_state)
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=False)
            if _wants_gradient(output) and grad is not None
        ]
        wanted = [value for value in apart if _wants_gradient(value)]
        found = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                create_graph=True,
                allow_unused=True,
            )
        )
        return tuple(next(found) if _wants_gradient(value) else None for value in apart)


def differentiate_twice(begin: Callable[[], Asked], undo: ExitStack) -> None:
    """Make graphs that are compiled from now on twice differentiable.

    Args:
        begin: Called when a graph is compiled. Returns a function that is called when the script
            takes a second derivative of it.
        undo: Takes the inverse.
    """
    common: Any = importlib.import_module("torch._dynamo.backends.common")
    wrappers: Any = importlib.import_module("torch._functorch._aot_autograd.runtime_wrappers")
    factory = getattr(wrappers, "_AOTDispatchAutogradFunctionFactory", None)
    if factory is None or not hasattr(common, "aot_module_simplified"):  # an older torch
        return
    compile_graph, build = common.aot_module_simplified, factory.build
    under_way: list[tuple[Any, tuple[str, torch.dtype, bool]]] = []

    @functools.wraps(compile_graph)
    def aot_module_simplified(graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        under_way.append((graph, _autocast_for(inputs)))
        try:
            return compile_graph(graph, inputs, *args, **kwargs)
        finally:
            under_way.pop()

    @functools.wraps(build)
    def build_function(self: Any) -> Any:
        function = build(self)
        if under_way and self.spec.maybe_subclass_meta is None:
            run, autocast = under_way[-1]
            graph = _Graph(run, self.spec.fw_metadata, autocast)
            if hasattr(run, "graph") and graph.repeatable:
                _extend(function, graph, begin())
        return function

    patching.put(common, "aot_module_simplified", aot_module_simplified, undo)
    patching.put(factory, "build", build_function, undo)


def _extend(function: Any, graph: _Graph, asked: Asked) -> None:
    """Have a compiled autograd function keep its inputs, and repeat itself if necessary."""
    plain_forward, plain_backward = function.forward, function.backward

    def forward(ctx: Any, *inputs: Any) -> Any:
        setattr(ctx, INPUTS, _Inputs(inputs))
        return plain_forward(ctx, *inputs)

    def backward(ctx: Any, *grads: Any) -> Any:
        inputs = getattr(ctx, INPUTS, None)
        if inputs is None or not torch.is_grad_enabled():
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                setattr(ctx, INPUTS, None)
            return plain_backward(ctx, *grads)
        asked()
        return inputs.differentiate(graph, grads[0])  # one list: `boxed_grads_call`

    function.forward, function.backward = staticmethod(forward), staticmethod(backward)


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
