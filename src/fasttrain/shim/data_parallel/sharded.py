"""Shards a root's parameters, gradients and optimizer states over the ranks.

torch's ``fully_shard`` does it in place. The script's optimizers were created with the whole
parameters, which are replaced by their shards. ``state_dict()`` and ``load_state_dict()`` go on to
work with whole tensors under the script's own keys.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import CellType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import stateless
from torch.optim import Optimizer

from fasttrain.model.errors import FasttrainError
from fasttrain.shim.data_parallel import mixed_shards
from fasttrain.shim.data_parallel.low_gathers import LowGathers, unwatched
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.data_parallel.whole_copies import COPIES, current, is_used, set_base
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.containers import map_tensors, tensors_in
from fasttrain.shim.hooks.device_clock import module_of
from fasttrain.shim.hooks.roots import Root, is_sharded, parameters_of, repeated_blocks
from fasttrain.shim.hooks.seams import Filing
from fasttrain.shim.process import refusal
from fasttrain.shim.process.callsite import own_prefixes
from fasttrain.shim.process.refusal import refuse

_SWAPPING = {stateless._functional_call.__code__}  # torch.func.functional_call calls it, too
# Parts of torch's messages where something can't be done with a sharded module
_OF_SHARDS = (*mixed_shards.OF_SHARDS, "attribute lookup FSDP", "FSDP does not support")
# The same once a model is sharded: a gradient by the shard of a whole parameter, and one through
# whole parameters that were freed after an earlier one; and gradients that FSDP can't reduce, or
# of a shard without rows; and data of another type than what FSDP has made.
_AFTER_SHARDING = (
    "appears to not have been used in the graph", "for storage of size 0",
    "its data is not allocated yet", "Could not run 'fsdp::", "norm on an empty tensor",
    "Expected out tensor to have dtype",
)  # fmt: skip
_NUMBER: Any = torch.ops.aten._local_scalar_dense.default  # reads a number
# Functions that return a scalar of all gradients, which is a DTensor.
_CLIPPERS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")

_LINE = 80  # characters of a line in which torch shows tensors
_KEPT_FREE = 0.1  # share of a device's memory that whole tensors of a checkpoint leave free


class ShardedReplica:
    """The sharded counterpart of `Replica`, with the same interface.

    Attributes:
        parameters: Its shards.
        uneven: True if it was trained since all ranks had the same buffers.
        registered, moved: As in `Replica`; unused.
        gathers: As in `Replica`.
        calls_together: As in `Replica`; nothing precedes the model's call.
        blocks: Number of submodules whose parameters are gathered one after the other.

    Args:
        module: The root.
        ranks: All ranks.
        optimizers: The script's, whose parameters and states become shards.
        tell: Called with sentences for the receipt.
        device_type: torch's type of the device that the shards are to be on; empty for that which
            the parameters are on.
        compiles: Returns True if the script compiles anything itself.
    """

    gathers = True
    calls_together = False

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks,
        optimizers: Iterable[Optimizer],
        tell: Callable[[str], None],
        device_type: str = "",
        compiles: Callable[[], bool] = lambda: False,
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self._ref = weakref.ref(module)
        self.uneven = False
        self.registered = self.moved = 0
        whole = dict(module.named_parameters(remove_duplicate=False))
        blocks = _without_ties(repeated_blocks(module), module)
        self.blocks = len(blocks)  # not they themselves: FSDP's states of them lead to the root
        COPIES.begin(ranks, tell)
        kind = device_type or next(parameters_of(module)).device.type
        _fully_shard([*blocks, module], init_device_mesh(kind, (ranks.world_size,)))
        shards = dict(module.named_parameters(remove_duplicate=False))
        places = {
            id(whole[name]): shards[name] for name in whole if whole[name] is not shards[name]
        }
        for name, parameter in whole.items():
            _exchange_hooks(parameter, shards[name])
            if parameter.grad is not None and parameter is not shards[name]:
                shards[name].grad = _cut(parameter.grad, shards[name])
        for optimizer in optimizers:
            _exchange_states(optimizer, places)
            _keep_states_whole(optimizer, tell)
        _exchange_references([p for p in whole.values() if id(p) in places], places, tell)
        COPIES.agree()
        gather = functools.partial(_gather_parameters, tell)
        parts: list[Any] = [part for part in module.modules() if part._parameters]
        for part in parts:
            part.register_state_dict_post_hook(gather)
            part.register_load_state_dict_pre_hook(_cut_parameters)
        # Scalars are averaged like parameters that no root owns.
        self.parameters = [p for p in parameters_of(module) if hasattr(p, "placements")]
        state, gathered = _set_up(module, blocks)
        low = LowGathers(module, state, gathered, ranks, tell, compiles)
        # FSDP's state has it, and this a weak reference: it holds the module by its parameters.
        state.low_gathers = low
        self._low_ref = weakref.ref(low)

    @property
    def _low(self) -> LowGathers:
        low = self._low_ref()
        assert low is not None
        return low

    def begin_pass(self) -> None:
        """Check that the script has no hooks on parameters that FSDP wouldn't run.

        Raises:
            SystemExit: ``fsdp-hooks``.
        """
        for parameter in self.parameters:
            if parameter._backward_hooks:
                refuse(_has_hooks())
        COPIES.before_change()

    def gather_first(self, ends: Iterable[Tensor]) -> None:
        """Gather all parameters at the beginning of a backward pass from these tensors.

        It may begin with a derivative of a derivative, which uses them before FSDP's own hooks.
        """
        fsdp: Any = sys.modules["torch.distributed.fsdp"]
        if (module := self._ref()) is None:
            return
        states = [
            fsdp.fully_shard.state(part)
            for part in nn.Module.modules(module)
            if isinstance(part, fsdp.FSDPModule)
        ]

        def gather(_: Any) -> None:
            for state in states:
                state._pre_backward(None)

        for node in {end.grad_fn for end in ends if end.grad_fn is not None}:
            node.register_prehook(gather)

    def watch(self) -> None:
        """Do nothing: each backward pass reduces the shards' gradients itself."""

    def call(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the module, which gathers its parameters block by block."""
        self._check_shards()
        with self._put_away_if_it_fails():
            return self._low.call(run, args, kwargs)

    def evaluate(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a call of the module that doesn't train."""
        self._check_shards()
        with self._low.in_their_type(), self._put_away_if_it_fails():
            return run(*args, **kwargs)

    def _check_shards(self) -> None:
        """Check that the module still has its shards.

        Raises:
            SystemExit: ``fsdp-replaced``.
        """
        for shard in self.parameters:
            owner: Any = _OWNERS.get(id(shard), lambda: None)()
            if owner is not None and owner.sharded_state.name == "SHARDED":
                info = owner._module_info
                if info.module._parameters.get(info.param_name) is not shard:
                    refuse(_is_replaced(_name(info.module), info.param_name))

    @contextmanager
    def _put_away_if_it_fails(self) -> Iterator[None]:
        """Shard the module again after a call that has raised, which the script may catch.

        It would otherwise be called with the whole parameters of that call from then on.
        """
        try:
            yield
        except BaseException:
            if (module := self._ref()) is not None:
                put_away(module)
            raise

    def begin_again(self) -> None:
        """Do nothing: FSDP moves and casts its parameters itself."""

    def look(self) -> None:
        """Do nothing: the parameters don't change."""

    def leave_ddp(self) -> None:
        """Do nothing: there is no DistributedDataParallel object."""

    def after_backward(self) -> None:
        """Average nothing: each shard's gradient is the mean over the ranks already."""
        if (low := self._low_ref()) is not None:
            low.after_backward()
        COPIES.after_change(lambda shard: not isinstance(shard, nn.Parameter))


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
    mixed_shards.install(undo)
    patching.wrap(torch, "save", _save_whole, undo, Filing.SHARDS)
    refusal.at_failure.append(_explain)
    undo.callback(refusal.at_failure.remove, _explain)


# What FSDP knows of each shard, by the shard's id.
_OWNERS: dict[int, weakref.ref[Any]] = {}


def _assign(assign: Any, tensor: Any, value: Any) -> None:
    """Make a tensor the data of a shard, where the script assigns ``parameter.data``.

    torch would put it beside what FSDP gathers, and it would never be used.

    Raises:
        SystemExit: ``fsdp-data`` if it has another shape or type.
    """
    COPIES.settle()
    COPIES.forget(tensor)
    owner: Any = _OWNERS.get(id(tensor), lambda: None)()
    if owner is None or owner.sharded_param is not tensor:
        cut = _cut(value, tensor)
        assign(tensor, cut)
        tensor._local_tensor = cut.detach().to_local()
        if cut is not value:  # such as a whole tensor for that of a gradient
            COPIES.adopt(tensor, value)
        return
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        refuse(_other_data(value, tensor))
    value = value.detach()
    if hasattr(value, "placements"):
        value = value.redistribute(tensor.device_mesh, tensor.placements)
    else:
        COPIES.adopt(tensor, value)
    tensor._local_tensor = _cut(value, tensor).to_local().contiguous()
    owner.reset_sharded_param()


class _Data(property):
    """`Tensor.data`, whose getter torch hands to ``__torch_function__``: it has a name."""

    __name__ = "data"


def _assign_whole(assign: Any, tensor: Tensor, value: Any) -> None:
    """Make a shard's whole tensor the data of a whole one; torch doesn't check and would crash."""
    assign(tensor, COPIES.share(value) if hasattr(value, "placements") else current(value))


def _number(_operator: Any, args: tuple[Any, ...], _kwargs: Any) -> Any:
    return _whole(args[0]).item()


def _of_the_whole(original: Any) -> Any:
    @functools.wraps(original)
    def method(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        whole: Any = _whole(tensor.detach())
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
        whole: Any = _whole(tensor.detach())
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
        whole = mixed_shards.whole_modules(map_tensors(obj, _whole))
        return original(whole, *args, **kwargs)

    return save


def _whole_result(original: Any) -> Any:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return _whole(original(*args, **kwargs))

    return function


def out_of_inference_mode(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that runs under ``no_grad`` where the script has `torch.inference_mode`.

    What FSDP gathers in inference mode it can't free, nor use in training.
    """
    if not torch.is_inference_mode_enabled():
        return call

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(mode=False), torch.no_grad():
            return call(*args, **kwargs)

    return run


def has_sharded_parts(module: nn.Module) -> bool:
    """True if a module has parts whose parameters are gathered when they are called."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    parts = [part for part in nn.Module.modules(module) if part is not module]
    return fsdp is not None and any(isinstance(part, fsdp.FSDPModule) for part in parts)


def put_away(module: nn.Module) -> None:
    """Free the whole parameters of a call that has raised: the module's are shards again."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for part in nn.Module.modules(module):
        if isinstance(part, fsdp.FSDPModule):
            # For FSDP such a call is still going on, and it would free nothing.
            state: Any = fsdp.fully_shard.state(part)
            group: Any = state._fsdp_param_group
            for one in (state, group):
                if one is not None and one._training_state.name == "FORWARD":
                    one._training_state = type(one._training_state).IDLE
            part.reshard()


@contextmanager
def writes_refused(module: nn.Module) -> Iterator[None]:
    """Check that no call in the block writes into parameters, since they are freed after it.

    Raises:
        SystemExit: ``fsdp-writes``.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    parts = [m for m in nn.Module.modules(module) if fsdp and isinstance(m, fsdp.FSDPModule)]
    key: Any = object()
    for part in parts:
        # Before FSDP's own, which frees them, and not registered: it is no hook of the script's.
        part._forward_hooks[key] = _check_unwritten
        part._forward_hooks.move_to_end(key, last=False)
    try:
        yield
    finally:
        for part in parts:
            part._forward_hooks.pop(key, None)


def _check_unwritten(part: nn.Module, *_: Any) -> None:
    fsdp: Any = sys.modules["torch.distributed.fsdp"]
    group: Any = fsdp.fully_shard.state(part)._fsdp_param_group
    with unwatched():
        for one in group.fsdp_params if group is not None else ():
            _check_rows(part, one)


def _check_rows(part: nn.Module, one: Any) -> None:
    shard = one.sharded_param
    whole = getattr(one._module_info.module, one._module_info.param_name).detach()
    rank, ranks = shard.device_mesh.get_local_rank(), shard.device_mesh.size()
    rows = whole.chunk(ranks) if whole.shape == shard.shape else ()
    kept = shard.detach().to_local().to(whole.dtype)
    same = rank >= len(rows) or torch.allclose(rows[rank], kept, 0.0, 0.0, equal_nan=True)
    if not same:
        refuse(_is_written(_name(part), one._module_info.param_name))


def check_unsharded(root: Root, module: nn.Module) -> None:
    """Check that no part of a module has been sharded alone or with another root.

    Raises:
        SystemExit: ``fsdp-parts``.
    """
    if is_sharded(module):
        refuse(_parts_are_sharded(root))


def check_own_parameters(root: Root) -> None:
    """Check that a module is called with its own parameters: only these are sharded.

    Raises:
        SystemExit: ``fsdp-functional``.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _SWAPPING:
            refuse(_is_functional(root))
        frame = frame.f_back


def _explain(error: BaseException) -> None:
    """Add a note to an error that comes from mixing shards with whole tensors."""
    if any(words in str(error) for words in (*_OF_SHARDS, *(_AFTER_SHARDING if _OWNERS else ()))):
        error.add_note(
            "--strategy fsdp has sharded the model's parameters, and the script does with them what"
            " only whole tensors support, such as mixing both, calling a part of the model alone,"
            " copying the model, changing its type, sparse gradients, or several derivatives"
            " through one call: use --strategy ddp"
        )


def _name(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")  # fully_shard derives a class of that name


def _is_functional(root: Root) -> FasttrainError:
    return FasttrainError(
        f"--strategy fsdp can't shard {root.name}, called at {root.where}",
        why="the script calls it with other tensors instead of its parameters (functional_call),"
        " and only parameters are sharded",
        fix="use --strategy ddp",
        slug="fsdp-functional",
    )


def _is_written(name: str, parameter: str) -> FasttrainError:
    return FasttrainError(
        f"--strategy fsdp can't train {name}, whose call changes its parameter {parameter}",
        why="in a call a parameter is gathered from all ranks, and what is written into it is lost"
        " when it is freed after the call",
        fix="use --strategy ddp",
        slug="fsdp-writes",
    )


def _is_replaced(name: str, parameter: str) -> FasttrainError:
    return FasttrainError(
        f"--strategy fsdp can't train {name}, whose parameter {parameter} the script has replaced",
        why="the one before was sharded by the model's first call, and the new one isn't",
        fix="change it in place (copy_, load_state_dict), or use --strategy ddp",
        slug="fsdp-replaced",
    )


def _parts_are_sharded(root: Root) -> FasttrainError:
    return FasttrainError(
        f"--strategy fsdp can't shard {root.name}, called at {root.where}",
        why="the script also calls parts of the model separately, and a part can be sharded either"
        " with its model or alone",
        fix="use --strategy ddp",
        slug="fsdp-parts",
    )


def _refused(module: nn.Module, error: Exception) -> FasttrainError:
    first = str(error).partition("\n")[0]
    return FasttrainError(
        f"--strategy fsdp can't shard {_name(module)}",
        why=f"torch's fully_shard raises {type(error).__name__}: {first}",
        fix="use --strategy ddp",
        slug="fsdp-refused",
    )


def _without_ties(blocks: list[nn.Module], root: nn.Module) -> list[nn.Module]:
    """Return the blocks that share no parameter with anything outside of them.

    ``fully_shard`` would make two parameters of one.
    """
    uses = _uses(root)
    return [block for block in blocks if _uses(block).items() <= uses.items()]


def _uses(module: nn.Module) -> Counter[int]:
    """Count the places in which each parameter is."""
    parts: list[Any] = list(nn.Module.modules(module))
    return Counter(id(p) for part in parts for p in part._parameters.values() if p is not None)


def _fully_shard(modules: list[nn.Module], mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    root = modules[-1]
    scalars = {parameter for parameter in parameters_of(root) if not parameter.dim()}
    how: dict[str, Any] = {"ignored_params": scalars} if scalars else {}  # not before torch 2.7
    # By default the last one keeps its whole parameters between forward and backward, and after a
    # validation: module.zero_grad() would pass by the gradients of the shards.
    how["reshard_after_forward"] = True
    for module in modules:
        before = list(parameters_of(module))
        try:
            fully_shard(module, mesh=mesh, **how)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            refuse(_refused(root, error))
        mixed_shards.let_copy(module)
        for parameter, shard in zip(before, parameters_of(module), strict=True):
            if parameter is not shard:
                COPIES.adopt(shard, parameter if is_used(parameter) else None)
                # The script's optimizers still refer to it: a block's goes before the next is
                # sharded.
                parameter.data = parameter.data.new_empty(0)


def _set_up(module: nn.Module, blocks: Iterable[nn.Module]) -> tuple[Any, list[Any]]:
    """Set up what FSDP otherwise does in the first call, as whose change it would look.

    Args:
        module: The root, sharded.
        blocks: Its parts that are gathered one after the other.

    Returns:
        FSDP's state of the root, and its parameters of the root and the blocks.

    Raises:
        SystemExit: ``fsdp-refused``.
    """
    fsdp: Any = sys.modules["torch.distributed.fsdp"]
    state: Any = fsdp.fully_shard.state(module)
    try:
        state._lazy_init()
    except (RuntimeError, AssertionError) as error:
        refuse(_refused(module, error))
    gathered: list[Any] = []
    for part in (*blocks, module):
        of_part: Any = fsdp.fully_shard.state(part)
        _gather_before_derivatives_of_bases(of_part)
        if of_part._fsdp_param_group is not None:
            gathered += of_part._fsdp_param_group.fsdp_params
    _OWNERS.update({id(one.sharded_param): weakref.ref(one) for one in gathered})
    return state, gathered


def _gather_before_derivatives_of_bases(state: Any) -> None:
    """Have FSDP gather a part's parameters for its backward pass if its output is a view, too.

    FSDP hooks the output, and warns that an operator that changes a view in place, such as ``x +=
    y``, drops the hook. The derivative of what it is a view of has to be computed all the same.
    """
    original: Any = state._register_pre_backward_hook

    @functools.wraps(original)
    def register(output: Any) -> Any:
        bases = [t._base for t in tensors_in(output) if t.requires_grad and t._base is not None]
        if not (bases and torch.is_grad_enabled()):
            return original(output)
        for node in {base.grad_fn for base in bases if base.grad_fn is not None}:
            node.register_prehook(lambda _: state._pre_backward(None))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return original(output)

    state._register_pre_backward_hook = register


def _exchange_states(optimizer: Optimizer, places: dict[int, Any]) -> None:
    """Shard an optimizer's states of whole parameters."""
    for parameter in [p for p in optimizer.state if id(p) in places]:
        shard = places[id(parameter)]
        state = optimizer.state.pop(parameter)
        optimizer.state[shard] = {k: _cut(v, shard) for k, v in state.items()}


def _exchange_hooks(whole: Any, shard: Any) -> None:
    """Have FSDP run the hooks that the script has on a whole parameter.

    It runs those that get the parameter once its gradient is there. Others would be lost.

    Raises:
        SystemExit: ``fsdp-hooks``.
    """
    if whole is shard:
        return
    if whole._backward_hooks:
        refuse(_has_hooks())
    # The same mapping, from which the script's handles remove.
    shard._post_accumulate_grad_hooks = whole._post_accumulate_grad_hooks


def _other_data(value: Tensor, shard: Tensor) -> FasttrainError:
    had, new = (f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (shard, value))
    return FasttrainError(
        f"--strategy fsdp can't give a parameter of {had} data of {new}",
        why="its shards on all ranks were made for the one it had",
        fix="use --strategy ddp",
        slug="fsdp-data",
    )


def _has_hooks() -> FasttrainError:
    return FasttrainError(
        "--strategy fsdp can't run the hooks that the script has on parameters (register_hook)",
        why="each rank has the gradient of its shard only, and torch's fully_shard runs no such"
        " hook; those of register_post_accumulate_grad_hook run",
        fix="use --strategy ddp",
        slug="fsdp-hooks",
    )


def _exchange_references(
    whole: list[Tensor], places: dict[int, Any], tell: Callable[[str], None]
) -> None:
    """Replace whole parameters by their shards wherever they are kept, such as in an optimizer.

    A script that has listed ``model.parameters()`` before the first call would otherwise clip,
    average or penalise parameters that nobody trains any more.

    Raises:
        SystemExit: ``fsdp-references`` if they are kept where they can't be replaced.
    """
    for holder in gc.get_referrers(*whole):
        if holder is not whole:
            _exchange_in(holder, places)
    for frame in _frames_of_script():
        # Its globals are a dict like others.
        own = {} if frame.f_locals is frame.f_globals else frame.f_locals
        for name in [name for name, value in own.items() if id(value) in places]:
            tell(
                f"{name} in {frame.f_code.co_name}() is a parameter as it was before it was"
                " sharded, and isn't trained: ask the model for it again"
            )


def _exchange_in(holder: Any, places: dict[int, Any]) -> None:
    """Replace parameters in a container."""
    if isinstance(holder, list | deque):
        for at, item in enumerate(holder):
            if id(item) in places:
                holder[at] = places[id(item)]
    elif isinstance(holder, dict):
        _exchange_in_dict(holder, places)
    elif isinstance(holder, set):
        kept = [places.get(id(item), item) for item in holder]
        holder.clear()
        holder.update(kept)
    elif isinstance(holder, CellType):
        holder.cell_contents = places[id(holder.cell_contents)]
    elif isinstance(holder, tuple | frozenset):
        refuse(_kept_in(type(holder).__name__))


def _exchange_in_dict(holder: dict[Any, Any], places: dict[int, Any]) -> None:
    if any(id(key) in places for key in holder):  # by parameter; the order stays
        items = [(places.get(id(k), k), places.get(id(v), v)) for k, v in holder.items()]
        holder.clear()
        holder.update(items)
        return
    for key, value in holder.items():
        if id(value) in places:
            holder[key] = places[id(value)]


def _frames_of_script() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith((*own_prefixes(), "<")):
            yield frame
        frame = frame.f_back


def _kept_in(kind: str) -> FasttrainError:
    return FasttrainError(
        f"the script keeps parameters in a {kind} that --strategy fsdp can't replace by shards",
        why="what refers to parameters from before the model's first call refers to tensors that"
        " nobody trains any more",
        fix=f"make the {kind} a list, or use --strategy ddp",
        slug="fsdp-references",
    )


def _keep_states_whole(optimizer: Optimizer, tell: Callable[[str], None]) -> None:
    """Have an optimizer save and load the whole states, as in one process."""
    ref = weakref.ref(optimizer)

    def gather(_: Optimizer, checkpoint: dict[str, Any]) -> dict[str, Any]:
        states = {
            key: {name: _for_checkpoint(value, tell) for name, value in state.items()}
            for key, state in checkpoint["state"].items()
        }
        return {**checkpoint, "state": states}

    def cut(_: Optimizer, checkpoint: dict[str, Any]) -> dict[str, Any]:
        owner: Any = ref()
        ours = [p for group in owner.param_groups for p in group["params"]]
        theirs = [p for group in checkpoint["param_groups"] for p in group["params"]]
        shards = dict(zip(theirs, ours, strict=False))
        states = {
            key: {name: _cut(value, shards[key]) for name, value in state.items()}
            if key in shards
            else state
            for key, state in checkpoint["state"].items()
        }
        return {**checkpoint, "state": states}

    optimizer.register_state_dict_post_hook(gather)
    optimizer.register_load_state_dict_pre_hook(cut)


def _gather_parameters(
    tell: Callable[[str], None], module: nn.Module, checkpoint: dict[str, Any], prefix: str, _: Any
) -> None:
    for name in module._parameters:
        if prefix + name in checkpoint:
            checkpoint[prefix + name] = _for_checkpoint(checkpoint[prefix + name], tell)


def _cut_parameters(module: nn.Module, checkpoint: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, shard in module._parameters.items():
        if prefix + name in checkpoint and shard is not None:
            checkpoint[prefix + name] = _cut(checkpoint[prefix + name], shard)


def _whole(value: Any) -> Any:
    """Return a sharded tensor as a whole one: a collective, so that every rank must call it."""
    COPIES.settle()
    gather = getattr(value, "full_tensor", None)
    return current(value) if gather is None else gather()


def _for_checkpoint(value: Any, tell: Callable[[str], None]) -> Any:
    """Return a whole tensor; on the CPU where its device is nearly full.

    A whole model beside its shards may be more than the device holds.
    """
    if not hasattr(value, "full_tensor"):
        return value
    memory: Any = getattr(module_of(value.device), "mem_get_info", None)
    if memory is not None:
        free, total = memory(value.device)
        if free <= _KEPT_FREE * total:
            tell(
                "the whole tensors of a state_dict() are on the CPU, since its device was nearly"
                " full"
            )
            return _whole(value).cpu()
    return COPIES.lend(value)


def _cut(value: Any, like: Any) -> Any:
    """Return this rank's shard of a tensor that has the parameter's shape; other values as is."""
    if not isinstance(value, Tensor) or hasattr(value, "placements"):
        return value
    if value.shape != like.shape or not hasattr(like, "placements"):
        return value
    from torch.distributed.tensor import distribute_tensor

    with torch.no_grad():
        return distribute_tensor(value.detach().to(like.device), like.device_mesh, like.placements)
