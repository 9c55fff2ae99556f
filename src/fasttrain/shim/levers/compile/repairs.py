"""Repairs faults of torch's compiler that silently give wrong results."""

from __future__ import annotations

import fcntl
import functools
import importlib
import inspect
import os
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.seams import then
from fasttrain.shim.levers.compile.unseen import unseen_deprecations

# Part of the keys of torch's compile caches, so that nothing compiled without the repairs is used.
CACHE_TAG = "fasttrain-repairs-5"
CHANGED_INPUT = (
    "its backward pass would read a state that its forward changes, such as the vectors of a"
    " spectral norm, after the change"
)
# Operators that refuse numbers: an index that is out of range, a probability that isn't one.
REFUSE_NUMBERS = (
    "embedding",
    "nll_loss_forward",
    "nll_loss2d_forward",
    "binary_cross_entropy",
)


def repair(undo: ExitStack) -> None:
    """Install the repairs that the present torch needs."""
    _keep_order_of_mutations(undo)
    _draw_each_time(undo)
    _draw_once(undo)
    _draw_in_order(undo)
    _order_checkpointed_draws(undo)
    _refuse_numbers(undo)
    _change_buffers_again(undo)
    _refuse_changed_inputs(undo)
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


def _draw_once(undo: ExitStack) -> None:
    """Break the graph where a function draws numbers that `functools.lru_cache` keeps.

    Dynamo traces such a function in place of looking into its cache: what the script draws once, at
    the first call, would be drawn in each call. A function that computes the same from the same
    arguments stays in the graph.

    Source: ``WrapperUserFunctionVariable`` in ``torch/_dynamo/variables/functions.py``, torch 2.13
    """
    functions: Any = importlib.import_module("torch._dynamo.variables.functions")
    exc: Any = importlib.import_module("torch._dynamo.exc")
    variable = getattr(functions, "WrapperUserFunctionVariable", None)
    if variable is not None and hasattr(exc, "unimplemented"):  # else an older torch
        kept = functools.partial(_unless_drawn, exc.unimplemented)
        patching.wrap(variable, "call_function", kept, undo)


def _unless_drawn(unimplemented: Callable[..., Any], original: Any) -> Any:
    @functools.wraps(original)
    def call_function(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self.wrapper_obj, "cache_info"):
            return original(self, tx, *args, **kwargs)
        nodes = tx.output.graph.nodes
        last = next(iter(reversed(nodes)), None)
        result = original(self, tx, *args, **kwargs)
        added = takewhile(lambda node: node is not last, reversed(nodes))
        if any(_draws(node.target) for node in added):
            unimplemented(
                gb_type="functools.lru_cache around random numbers",
                context="",
                explanation="The cache has the numbers of its first call.",
                hints=[],
            )
        return result

    return call_function


@functools.cache
def _draws(target: Any) -> bool:
    """True if what a node of dynamo's graph calls draws random numbers."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    packet: Any = getattr(torch.ops.aten, name, None) if name else None
    overloads = packet.overloads() if hasattr(packet, "overloads") else ()
    kinds = (getattr(packet, overload).tags for overload in overloads)
    return any(torch.Tag.nondeterministic_seeded in tags for tags in kinds)


def _draw_in_order(undo: ExitStack) -> None:
    """Have `rand_like` and its kin draw in the memory order that their tensor has eagerly.

    On a CPU inductor has a convolution write channels_last. ``randn_like`` of it has that order,
    too, in which torch draws other numbers, and twice as many: so all later draws differ as well.
    torch 2.13 keeps the order for dropout alone (``torch/_inductor/lowering.py``).
    """
    lowering: Any = importlib.import_module("torch._inductor.lowering")
    constraints = getattr(lowering, "_maybe_layout_constraints", None)
    if constraints is None or not hasattr(lowering, "constrain_to_fx_strides"):  # before torch 2.5
        return
    for name in ("rand_like", "randn_like", "randint_like"):
        packet = getattr(torch.ops.aten, name)
        for overload in (getattr(packet, each) for each in packet.overloads()):
            if overload not in constraints:
                constraints[overload] = lowering.constrain_to_fx_strides
                undo.callback(constraints.pop, overload, None)


def _order_checkpointed_draws(undo: ExitStack) -> None:
    """Have dropout in a checkpoint draw in the script's order.

    torch ties the operators of a graph that draw to the order that they have in it. Where a
    checkpoint repeats one, it is inside of another, which saves the random state, and which isn't
    tied: of two branches, each with a dropout, the second one may be computed first.

    Source: torch 2.13, ``torch/_inductor/fx_passes/post_grad.py``, _chain_random_ops_for_ordering,
    and ``functionalize_rng_ops`` in ``torch/_functorch/partitioners.py``
    """
    with unseen_deprecations():  # of what torch itself uses, where it is imported
        passes: Any = importlib.import_module("torch._inductor.fx_passes.post_grad")
    if hasattr(passes, "_is_nondeterministic_seeded_node"):  # else an older torch
        patching.wrap(passes, "_is_nondeterministic_seeded_node", _or_in_checkpoint, undo)


def _or_in_checkpoint(original: Any) -> Any:
    saving = importlib.import_module("torch._prims.rng_prims").run_and_save_rng_state

    @functools.wraps(original)
    def draws(node: Any) -> bool:
        return bool(original(node)) or (node.op == "call_function" and node.target is saving)

    return draws


def _refuse_numbers(undo: ExitStack) -> None:
    """Have torch's own kernels run on a CPU where these refuse numbers.

    inductor's code has an index looked at inside of a parallel loop, which no exception leaves:
    the process is aborted, where the script could catch an IndexError, and its exit handlers and
    ``finally`` would run. Probabilities it doesn't look at, so that NaN is trained on.

    Source: torch 2.13, ``torch/_inductor/lowering.py``, embedding and gather,
    ``torch/_inductor/codegen/cpp.py``, check_bounds, and ``torch/_decomp/decompositions.py``.
    """
    lowering: Any = importlib.import_module("torch._inductor.lowering")
    decompositions: Any = importlib.import_module("torch._inductor.decomposition").decompositions
    for name in REFUSE_NUMBERS:
        operator = getattr(torch.ops.aten, name).default
        if operator in decompositions:
            _replace(decompositions, operator, _not_on_cpus(decompositions[operator]), undo)
        by_torch = lowering.fallback_handler(operator, add_to_fallback_set=False)
        lowered = _by_torch_on_cpus(by_torch, lowering.lowerings.get(operator))
        _replace(lowering.lowerings, operator, lowered, undo)


def _replace(table: dict[Any, Any], key: Any, value: Any, undo: ExitStack) -> None:
    if key in table:
        undo.callback(table.__setitem__, key, table[key])
    else:
        undo.callback(table.pop, key, None)
    table[key] = value


def _not_on_cpus(decompose: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(decompose)
    def decomposition(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if first.device.type == "cpu":
            return NotImplemented  # the operator stays in the graph
        return decompose(first, *args, **kwargs)

    return decomposition


def _by_torch_on_cpus(by_torch: Callable[..., Any], lower: Callable[..., Any] | None) -> Any:
    def lowering(first: Any, *args: Any, **kwargs: Any) -> Any:
        if lower is None or first.get_device().type == "cpu":
            return by_torch(first, *args, **kwargs)
        return lower(first, *args, **kwargs)

    return lowering


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


def _refuse_changed_inputs(undo: ExitStack) -> None:
    """Have a graph run eagerly whose backward pass reads an input that its forward has changed.

    The forward's graph writes a parameter or buffer that is changed under ``no_grad`` or through
    ``.data`` at its end, and the partitioner still takes it for an input that costs nothing to
    save. The backward pass computes from it what the forward has computed before: other gradients,
    without an error if there was one call, and with one about its version after two.

    Source: torch 2.13, ``torch/_functorch/partitioners.py``, min_cut_rematerialization_partition
    """
    with unseen_deprecations():  # of what torch itself uses, where it is imported
        compiler: Any = importlib.import_module("torch._inductor.compile_fx")
    name = "min_cut_rematerialization_partition"
    if hasattr(compiler, name):
        patching.wrap(compiler, name, _unless_changed, undo)


def _unless_changed(original: Any) -> Any:
    @functools.wraps(original)
    def partition(*args: Any, **kwargs: Any) -> Any:
        forward, backward = original(*args, **kwargs)
        read = {node.name for node in backward.graph.nodes}  # computed again, or saved
        if read & set(_changed_inputs(forward.graph)):
            raise RuntimeError(CHANGED_INPUT)
        return forward, backward

    return partition


def _changed_inputs(graph: Any) -> Iterator[str]:
    """Yield the names of a graph's inputs that it changes, and of what it gives to ``.data``.

    Eagerly what is given to ``.data`` by a later call is also what an earlier one has saved.
    """
    aten = torch.ops.aten
    for target in (aten.copy_.default, aten.set_.source_Tensor):
        for node in graph.find_nodes(op="call_function", target=target):
            changed, given = node.args[:2]
            if changed.op == "placeholder":
                yield changed.name
                if target is aten.set_.source_Tensor:
                    yield given.name


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
