"""Shards a root's parameters, gradients and optimizer states over the ranks.

torch's ``fully_shard`` does it in place. The script's optimizers were created with the whole
parameters, which are replaced by their shards. ``state_dict()`` and ``load_state_dict()`` go on to
work with whole tensors under the script's own keys.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import unserializable_hook

from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.data_parallel.shards import mixed
from fasttrain.shim.data_parallel.shards.checkpoints import (
    cut_like,
    cut_parameters,
    gather_parameters,
)
from fasttrain.shim.data_parallel.shards.low_gathers import LowGathers
from fasttrain.shim.data_parallel.shards.references import (
    exchange_hooks,
    exchange_references,
    exchange_states,
)
from fasttrain.shim.data_parallel.shards.refusals import (
    hooks_error,
    name_of,
    refused_error,
    replaced_error,
)
from fasttrain.shim.data_parallel.shards.whole_copies import COPIES, is_used
from fasttrain.shim.hooks.containers import tensors_in
from fasttrain.shim.hooks.roots import parameters_of, repeated_blocks
from fasttrain.shim.process.refusal import refuse


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
            exchange_hooks(parameter, shards[name])
            if parameter.grad is not None and parameter is not shards[name]:
                shards[name].grad = cut_like(parameter.grad, shards[name])
        for optimizer in optimizers:
            exchange_states(optimizer, places)
        exchange_references([p for p in whole.values() if id(p) in places], places)
        COPIES.agree()
        gather = functools.partial(gather_parameters, tell)
        parts: list[Any] = [part for part in module.modules() if part._parameters]
        for part in parts:
            part.register_state_dict_post_hook(gather)
            part.register_load_state_dict_pre_hook(cut_parameters)
        # Scalars are averaged like parameters that no root owns.
        self.parameters = [p for p in parameters_of(module) if hasattr(p, "placements")]
        self._accumulators: dict[int, Any] = {}  # kept, as torch drops them after each pass
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
        """Check the hooks that the script has on parameters, and have their gradients be cut.

        Raises:
            SystemExit: ``fsdp-hooks`` if FSDP would not run them.
        """
        for parameter in self.parameters:
            if parameter._backward_hooks:
                refuse(hooks_error())
            if parameter.requires_grad and id(parameter) not in self._accumulators:
                self._accumulators[id(parameter)] = _accumulator(parameter)
        COPIES.before_backward()

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

    def evaluate(self, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
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
            owner: Any = mixed.OWNERS.get(id(shard), lambda: None)()
            if owner is not None and owner.sharded_state.name == "SHARDED":
                info = owner._module_info
                if info.module._parameters.get(info.param_name) is not shard:
                    refuse(replaced_error(name_of(info.module), info.param_name))

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
        COPIES.after_backward()


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
            refuse(refused_error(root, error))
        mixed.let_copy(module)
        # Once for each parameter: tied ones are in several places.
        pairs = {id(p): (p, s) for p, s in zip(before, parameters_of(module), strict=True)}
        for parameter, shard in pairs.values():
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
        refuse(refused_error(module, error))
    gathered: list[Any] = []
    for part in (*blocks, module):
        of_part: Any = fsdp.fully_shard.state(part)
        # Of an output that the script saves torch would warn that it doesn't save FSDP's hook.
        unserializable_hook(type(of_part)._pre_backward)  # type: ignore[no-untyped-call]
        _gather_before_derivatives_of_bases(of_part)
        if of_part._fsdp_param_group is not None:
            gathered += of_part._fsdp_param_group.fsdp_params
    mixed.OWNERS.update({id(one.sharded_param): weakref.ref(one) for one in gathered})
    return state, gathered


def _accumulator(shard: Any) -> Any:
    """Return the node that adds to a shard's gradient, and have it add what is cut as the shard is.

    What DTensor computes for a penalty may be cut otherwise. That on a parameter with fewer rows
    than ranks, such as the weight of a layer with one output, comes whole to each rank.
    """
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        node: Any = shard.view_as(shard).grad_fn.next_functions[0][0]
    mesh, placements = shard.device_mesh, shard.placements

    def cut(gradients: tuple[Any, ...]) -> Any:
        given = getattr(gradients[0], "placements", placements)
        return (gradients[0].redistribute(mesh, placements),) if given != placements else None

    node.register_prehook(cut)
    return node


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
