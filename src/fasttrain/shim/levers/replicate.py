"""Makes the ranks of a script that knows nothing of ranks one data-parallel run.

Each root is trained on the rank's part of the batch, and behind each backward pass the gradients
are the mean over the ranks, weighted so that they are those of the whole batch. Parameters that
belong to no root are averaged too. What the script does to itself, clipping, accumulating,
stepping, it then does alike on every rank.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fasttrain.shim import rank_variables
from fasttrain.shim.callsite import call_site
from fasttrain.shim.ledger import Ledger
from fasttrain.shim.lockstep import Lockstep
from fasttrain.shim.parallel_context import ParallelContext
from fasttrain.shim.passes import Passes
from fasttrain.shim.refusal import refuse
from fasttrain.shim.replica import Replica
from fasttrain.shim.roots import Call, Root, parameters_of
from fasttrain.shim.sharded import ShardedReplica, check_unsharded, whole_number
from fasttrain.spec.errors import FasttrainError
from fasttrain.spec.outcome import State

# Functions that read all gradients before the step.
_CLIPPERS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")

WATCHED_STEPS = 4  # in which a loop shows whether it draws random numbers


class Replicate:
    """Averages gradients over the ranks.

    Attributes:
        passes: The backward passes.
        on_cede: Called when the script turns out to handle its ranks itself.
    """

    def __init__(self, ledger: Ledger, context: ParallelContext) -> None:
        self.ledger = ledger
        self.on_cede: list[Callable[[], None]] = []
        self._roots = context.roots
        self._ranks = context.ranks
        self._streams = context.streams
        self._training = context.training
        self._batches = context.batches
        self._sync_bn = context.strategy.sync_bn
        self._sharded = context.strategy.mode == "fsdp"
        self._lockstep = Lockstep(context.ranks)
        self.passes = Passes(context)
        self._accumulation = self.passes.accumulation

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
        if self._ranks.boardless:
            self.ledger.note(
                "no memory could be shared among the ranks of this node: what they ask each other"
                " about losses goes through collectives, which makes each step longer"
            )
        shapes = [f"{n} {tuple(p.shape)} {p.dtype}" for n, p in module.named_parameters()]
        self._lockstep.compare_models(root.name, root.where, shapes)
        self._ranks.broadcast([*parameters_of(module), *module.buffers()])

    def _around(self, root: Root, module: nn.Module, call: Call) -> Call:
        trains = root.trainable or any(p.requires_grad for p in parameters_of(module))
        if not torch.is_grad_enabled() or not trains or not self.ledger.live:
            self._even_out(root, module)
            return call
        if root.replica is None:
            root.replica = self._replicate(root, module)
            self.passes.add(root.replica)
        root.replica.uneven = True
        self.ledger.apply(root.name, root.where)
        return functools.partial(self._call, root, call)

    def _call(self, root: Root, call: Call, *args: Any, **kwargs: Any) -> Any:
        self._batches.trained = True
        parameter = root.parameter()
        device = parameter.device if parameter is not None else None
        with self._streams.for_forward(device):
            return root.replica.call(call, args, kwargs, last=self._accumulation.last)

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

    def _even_out(self, root: Root, module: nn.Module) -> None:
        """Give every rank rank 0's running statistics before a model is evaluated."""
        if root.replica is not None and root.replica.uneven:
            root.replica.uneven = False
            self._ranks.broadcast(list(module.buffers()))

    def _tell_batch_norm(self, root: Root, module: nn.Module) -> None:
        norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        if norms and not self._sync_bn and not isinstance(norms[0], nn.SyncBatchNorm):
            self.ledger.note(
                f"BatchNorm in {root.name} takes its statistics over each rank's part of the batch:"
                " --sync-bn takes them over the whole one"
            )

    # --- backward passes

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        inside = torch._C._current_graph_task_id() != -1
        if inside or not self.ledger.live or not self._ranks.joined:
            original(*args, **kwargs)
        else:
            self.passes.run(original, *args, **kwargs)

    def _flush(self) -> None:
        if self.ledger.live and self._ranks.joined:
            self.passes.flush()

    # --- steps

    def _before_step(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._flush()
            self._accumulation.stepping = True  # a closure's passes are each for themselves

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or not self.ledger.live or not self._ranks.joined:
            return
        self._accumulation.after_step()
        self.ledger.counts["steps"] = steps = self.ledger.counts["steps"] + 1
        if steps <= WATCHED_STEPS:
            self._watch_draws(steps)
        self._lockstep.after_step(steps, None if self._sharded else optimizer)

    def _watch_draws(self, steps: int) -> None:
        """Tell from the first steps what the loop itself draws from the shared random numbers."""
        if steps == 1 and self._batches.fed == "nothing":
            self._batches_by_hand()
        elif self._streams.moved() and steps > 1:
            # Noise that the loop draws for its samples must differ from rank to rank as well.
            self._streams.diverge(torch_alone=True)
            self.ledger.note(
                f"the loop draws random numbers of torch's: from step {steps + 1} on each rank"
                " draws its own"
            )

    def _batches_by_hand(self) -> None:
        self._streams.diverge()
        self.ledger.note(
            "no DataLoader feeds the training: from its second step on each rank draws batches of"
            f" its own, so that the global batch is {self._ranks.world_size} times the script's"
        )
