"""Makes the ranks of a script that knows nothing of ranks one data-parallel run.

Each root is trained on the rank's part of the batch, and behind each backward pass the gradients
are the mean over the ranks, weighted so that they are those of the whole batch. Parameters that
belong to no root are averaged too. What the script does to itself, clipping, accumulating,
stepping, it then does alike on every rank.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fasttrain.shim import rank_variables
from fasttrain.shim.accumulation import Accumulation
from fasttrain.shim.callsite import call_site
from fasttrain.shim.ledger import Ledger
from fasttrain.shim.lockstep import Lockstep
from fasttrain.shim.parallel_context import ParallelContext
from fasttrain.shim.refusal import refuse
from fasttrain.shim.replica import Replica
from fasttrain.shim.roots import Call, Root, parameters_of
from fasttrain.shim.sharded import ShardedReplica, check_unsharded, whole_number
from fasttrain.shim.stray_parameters import StrayParameters
from fasttrain.spec.errors import FasttrainError
from fasttrain.spec.outcome import State

# Functions that read all gradients before the step.
_CLIPPERS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")

WATCHED_STEPS = 4  # in which a loop shows whether it draws random numbers


class Replicate:
    """Averages gradients over the ranks."""

    def __init__(self, ledger: Ledger, context: ParallelContext) -> None:
        self.ledger = ledger
        self.on_cede: list[Callable[[], None]] = []
        self._roots = context.roots
        self._ranks = context.ranks
        self._streams = context.streams
        self._training = context.training
        self._batches = context.batches
        self._weights = context.weights
        self._sync_bn = context.strategy.sync_bn
        self._sharded = context.strategy.mode == "fsdp"
        self._lockstep = Lockstep(context.ranks)
        self._replicas: weakref.WeakKeyDictionary[Root, Replica | ShardedReplica] = (
            weakref.WeakKeyDictionary()
        )
        self._living: list[Replica | ShardedReplica] = []
        self._accumulation = Accumulation(enabled=context.accumulates)
        self._strays = StrayParameters(context.ranks, context.training)
        self._dirty_buffers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.after_backward: list[Callable[[Sequence[Tensor], bool], None]] = []

    def install(self, undo: ExitStack) -> None:
        """Stand around roots and backward passes, and watch for the script's own group."""
        self._watch_group(undo)
        self._roots.on_discover.append(self._meet)
        undo.callback(self._roots.on_discover.remove, self._meet)
        self._roots.around = self._around
        undo.callback(setattr, self._roots, "around", None)
        self._replace(torch.autograd, "backward", self._backward, undo)
        for name in _CLIPPERS:
            if hasattr(nn.utils, name):
                self._flush_before(name, undo)
        self._training.on_zero_grad.append(self._accumulation.on_zero_grad)
        undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self._lockstep.install(undo)
        self.ledger.settle(State.ARMED, "no module was trained")
        self.ledger.counts["ranks"] = self._ranks.world_size

    def refresh(self) -> None:
        """Tell of batches that came to nothing."""
        if self._batches.fed == "cut":
            self.ledger.excuse(
                State.FAILED,
                "batches were cut, but no module was trained on them: a script that leaves out"
                " batches of another size than its own needs --batch per-rank",
            )

    def _replace(self, owner: Any, name: str, act: Any, undo: ExitStack) -> None:
        original = getattr(owner, name)
        undo.callback(setattr, owner, name, original)
        setattr(owner, name, functools.wraps(original)(functools.partial(act, original)))

    def _flush_before(self, name: str, undo: ExitStack) -> None:
        def flushed(original: Any, *args: Any, **kwargs: Any) -> Any:
            self._flush()
            return whole_number(original(*args, **kwargs))

        modules = [nn.utils, sys.modules["torch.nn.utils.clip_grad"]]
        for module in modules:
            if hasattr(module, name):
                self._replace(module, name, flushed, undo)

    # --- whose ranks they are

    def _watch_group(self, undo: ExitStack) -> None:
        def init_process_group(original: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._ranks.joining and self.ledger.live:
                self._script_has_its_own()
            return original(*args, **kwargs)

        for module in (dist, dist.distributed_c10d):
            self._replace(module, "init_process_group", init_process_group, undo)

    def _script_has_its_own(self) -> None:
        where = call_site()
        if self._ranks.joined:
            refuse(
                FasttrainError(
                    f"the script joins a process group itself at {where}",
                    why="it had been made data-parallel by then, and both can't average",
                    fix="use --strategy none, which leaves the ranks to the script",
                    slug="strategy-script",
                )
            )
        self._roots.around = None
        rank_variables.restore()
        self.ledger.cede("the script handles its ranks itself", "init_process_group", where)
        for cede in self.on_cede:
            cede()

    # --- roots

    def _meet(self, root: Root, module: nn.Module) -> None:
        """Make a root's values equal on all ranks before its first call."""
        if not self.ledger.live:
            return
        self._ranks.join()
        shapes = [f"{n} {tuple(p.shape)} {p.dtype}" for n, p in module.named_parameters()]
        self._lockstep.compare_models(root.name, root.where, shapes)
        self._ranks.broadcast([*parameters_of(module), *module.buffers()])

    def _around(self, root: Root, module: nn.Module, call: Call) -> Call:
        trains = root.trainable or any(p.requires_grad for p in parameters_of(module))
        if not torch.is_grad_enabled() or not trains or not self.ledger.live:
            self._even_out(module)
            return call
        replica = self._replicas.get(root)
        if replica is None:
            replica = self._replicas[root] = self._replicate(root, module)
            self._living.clear()
        self._dirty_buffers.add(module)
        self.ledger.apply(root.name, root.where)
        parameter = root.parameter()
        device = parameter.device if parameter is not None else None
        last = self._accumulation.last

        def run(*args: Any, **kwargs: Any) -> Any:
            self._batches.trained = True
            with self._streams.for_forward(device):
                return replica.call(call, args, kwargs, last=last)

        return run

    def _replicate(self, root: Root, module: nn.Module) -> Replica | ShardedReplica:
        self._tell_batch_norm(root, module)
        if not self._sharded:
            return Replica(module, self._ranks)
        check_unsharded(root, module)
        replica = ShardedReplica(module, self._ranks, self._training.optimizers)
        self.ledger.counts["sharded blocks"] += len(replica.blocks)
        self.ledger.note(
            f"{root.name} is sharded in place from its first training call: parameters and"
            " gradients that the script keeps hold of are shards; state_dict() gives whole ones"
        )
        return replica

    def _even_out(self, module: nn.Module) -> None:
        """Give every rank rank 0's running statistics before a model is evaluated."""
        if module in self._dirty_buffers:
            self._dirty_buffers.discard(module)
            self._ranks.broadcast(list(module.buffers()))

    def _tell_batch_norm(self, root: Root, module: nn.Module) -> None:
        norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        if norms and not self._sync_bn and not isinstance(norms[0], nn.SyncBatchNorm):
            self.ledger.note(
                f"BatchNorm in {root.name} takes its statistics over each rank's part of the batch:"
                " --sync-bn takes them over the whole one"
            )

    # --- backward passes

    def _backward(
        self,
        original: Callable[..., Any],
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        inside = torch._C._current_graph_task_id() != -1
        if inside or not self.ledger.live or not self._ranks.joined:
            original(tensors, grad_tensors, retain_graph, create_graph, *args, **kwargs)
            return
        losses = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        with self._ranks.waits():
            early = self._begins_afresh() and not create_graph
            seeds = self._weighted(losses, grad_tensors, early=early)
            original(losses, seeds, retain_graph, create_graph, *args, **kwargs)
            average = self._accumulation.average_after_pass()
            for replica in self._replicas_now():
                replica.after_backward(average=average)
            rooted = [replica.parameters for replica in self._replicas_now()]
            self._strays.after_backward(rooted, average=average)
            self._put_right(self._weights.settle())
        freed = not (retain_graph or create_graph)
        if not freed:  # another pass may go through the same graphs, without a call before it
            for replica in self._replicas_now():
                replica.watch()
        for listen in self.after_backward:
            listen(losses, freed)

    def _replicas_now(self) -> list[Replica | ShardedReplica]:
        """Give those of the roots that are alive; a list, because weak references are slow."""
        if len(self._living) != len(self._replicas):
            self._living = list(self._replicas.values())
        return self._living

    def _trained(self) -> Iterator[Tensor]:
        seen: set[int] = set()  # a part may be a root as well
        groups = [replica.parameters for replica in self._replicas_now()]
        for parameter in itertools.chain(*groups, self._strays.parameters):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter

    def _begins_afresh(self) -> bool:
        """Whether all gradients behind a pass will be its own, and nothing uses them before."""
        fresh = [replica.begin_pass() for replica in self._replicas_now()]
        return all(fresh) and all(p.grad is None for p in self._strays.parameters)

    def _put_right(self, factor: float) -> None:
        """Multiply the gradients that a pass has left by what its weights were off."""
        if factor != 1.0:
            with torch.no_grad():
                for parameter in self._trained():
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)

    def _weighted(self, losses: Sequence[Tensor], grad_tensors: Any, *, early: bool) -> Any:
        """Give what the pass begins with, so that the mean over the ranks is right."""
        scalars = all(loss.numel() == 1 and loss.requires_grad for loss in losses)
        if not scalars or not losses:
            return grad_tensors
        self._weights.begin_pass()
        weighed = self._weights.weigh(losses, value=self._weights.values, early=early)
        seeds = (None,) if grad_tensors is None else grad_tensors
        seeds = (seeds,) if isinstance(seeds, Tensor) else tuple(seeds)
        seeds = seeds if len(seeds) == len(losses) else (None,) * len(losses)
        return [_seed(*each) for each in zip(losses, seeds, weighed, strict=True)]

    def _flush(self) -> None:
        """Average what was left to a later pass."""
        if not self.ledger.live or not self._ranks.joined:
            return
        for replica in self._replicas_now():
            if replica.pending:
                replica.average()
        self._strays.flush()

    # --- steps

    def _before_step(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._flush()
            self._accumulation.stepping = True  # a closure's passes are each for themselves

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or not self.ledger.live or not self._ranks.joined:
            return
        self._accumulation.after_step()
        self.ledger.counts["steps"] += 1
        steps = self.ledger.counts["steps"]
        if steps == 1 and self._batches.fed == "nothing":
            self._batches_by_hand()
        elif steps <= WATCHED_STEPS and self._streams.moved() and steps > 1:
            # Noise that the loop draws for its samples must differ from rank to rank as well.
            self._streams.diverge(torch_alone=True)
            self.ledger.note(
                f"the loop draws random numbers of torch's: from step {steps + 1} on each rank"
                " draws its own"
            )
        self._lockstep.after_step(steps, None if self._sharded else optimizer)

    def _batches_by_hand(self) -> None:
        self._streams.diverge()
        self.ledger.note(
            "no DataLoader feeds the training: from its second step on each rank draws batches of"
            f" its own, so that the global batch is {self._ranks.world_size} times the script's"
        )


def _seed(loss: Tensor, seed: Tensor | None, weighed: Any) -> Tensor | None:
    factor = weighed.factor
    if isinstance(factor, float) and factor == 1.0:
        return seed
    if seed is None and isinstance(factor, float):
        return torch.full_like(loss, factor)
    if seed is None:
        seed = torch.ones_like(loss)
    return seed * (factor.to(seed.device, seed.dtype) if isinstance(factor, Tensor) else factor)
