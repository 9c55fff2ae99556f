"""Turns the ranks of a single-process script into one data-parallel run.

Every rank runs the script on the whole batch. Calls of roots are split among the ranks, and after
each backward pass the gradients are averaged over the ranks, including those of parameters that no
root owns. Everything else the script does in the same way on every rank.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import data as torchs_data

from fasttrain.model.errors import FasttrainError
from fasttrain.model.outcome import State
from fasttrain.shim.data_parallel.backward import BackwardPasses
from fasttrain.shim.data_parallel.context import ParallelContext
from fasttrain.shim.data_parallel.held_models import HeldModels
from fasttrain.shim.data_parallel.rank_consistency import RankConsistency, SameLine
from fasttrain.shim.data_parallel.replica import Replica
from fasttrain.shim.data_parallel.shards import checks, reads
from fasttrain.shim.data_parallel.shards.checkpoints import keep_states_whole
from fasttrain.shim.data_parallel.shards.replica import ShardedReplica, out_of_inference_mode
from fasttrain.shim.data_parallel.shards.whole_copies import COPIES
from fasttrain.shim.data_parallel.split import batch_norm, whole_batch
from fasttrain.shim.data_parallel.split.call import SplitCalls
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.gradients import take_one_by_one
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.hooks.roots import Call, Root, is_sharded, parameters_of
from fasttrain.shim.hooks.seams import Differentiating
from fasttrain.shim.process import entry
from fasttrain.shim.process.callsite import call_site, own_prefixes
from fasttrain.shim.process.refusal import refuse

_BY_GLOO = (
    "the ranks of this node can't share enough memory, such as where /dev/shm is full: what they"
    " exchange goes by gloo instead, which is slower"
)


class Replicate:
    """Splits the calls of roots and averages gradients over the ranks.

    Attributes:
        splits: The split calls; unused where each rank has its own batches.
        passes: The backward passes.
        fed: Returns True if a DataLoader has dealt batches to the ranks.
        on_cede: Called when the script turns out to handle its ranks itself.
    """

    def __init__(self, recorder: OutcomeRecorder, context: ParallelContext) -> None:
        self.recorder = recorder
        self.on_cede: list[Callable[[], None]] = []
        self._roots = context.roots
        self._ranks = context.ranks
        self._streams = context.streams
        self._splits_batches = context.strategy.batch == "split"
        self._training = context.training
        self._compiled = context.compiled
        self._sharded = context.strategy.mode == "fsdp"
        self._held = HeldModels(recorder.note)
        self._consistency = RankConsistency(context.ranks)
        self._same_line = SameLine(context.ranks)
        # Roots with lazy parameters, which are created in the first call, and those that were first
        # called where code runs whole.
        self._unmet: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.fed: Callable[[], bool] = lambda: True
        self.splits = SplitCalls(recorder, context)
        self.passes = BackwardPasses(context)
        self.splits.unowned = self.passes.unowned

    def install(self, undo: ExitStack) -> None:
        """Wrap roots and backward passes; watch for a process group of the script's own."""
        self._watch_group(undo)
        self._roots.on_discover.append(self._meet)
        undo.callback(self._roots.on_discover.remove, self._meet)
        self._roots.around = self._around
        undo.callback(setattr, self._roots, "around", None)
        place = Differentiating.RANKS
        patching.wrap(torch.autograd, "backward", _done_by(self._backward), undo, place)
        patching.wrap(torch.autograd, "grad", _done_by(self._grad), undo, place)
        take_one_by_one(self.recorder.note, undo)
        if self._splits_batches:
            self.splits.install(undo)
            batch_norm.install(self.splits, self._ranks, undo)
            whole_batch.install_losses(self.splits, undo)
            whole_batch.install_checkpoints(self.splits, undo)
        if self._sharded:
            reads.install(undo)
            self._held.install(undo)
            # Each: one that is made or gets the parameters once they are shards has them, too.
            keep = functools.partial(keep_states_whole, self.recorder.note)
            self._training.on_made.append(keep)
            undo.callback(self._training.on_made.remove, keep)
        undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self._consistency.install(undo)
        self.recorder.settle(State.ARMED, "no module was called")
        self.recorder.counts["ranks"] = self._ranks.world_size

    def refresh(self) -> None:
        """Do nothing: every call is counted as it happens."""

    # --- the script's own process group

    def _watch_group(self, undo: ExitStack) -> None:
        def init_process_group(original: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._ranks.joining and self.recorder.live:
                self._script_has_its_own()
            return original(*args, **kwargs)

        def is_initialized(original: Any) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            ours = self._splits_batches and self._ranks.joined and self.recorder.live
            ours = ours and not _works_with_the_group(caller)
            return False if ours else original()

        # A script and its libraries would add up over ranks what each has of the whole batch, and
        # torch's DataLoader would give each rank a part of a data pipe's rows.
        patching.wrap(dist, "is_initialized", _done_by(is_initialized), undo)
        for module in (dist, dist.distributed_c10d):
            patching.wrap(module, "init_process_group", _done_by(init_process_group), undo)

    def _script_has_its_own(self) -> None:
        where = call_site()
        if self._ranks.joined:
            refuse(
                FasttrainError(
                    f"the script joins a process group itself at {where}",
                    why="fasttrain had made it data-parallel by then, and only one can average",
                    fix="use --strategy none, which leaves the ranks to the script",
                    slug="strategy-script",
                )
            )
        self._roots.around = None
        entry.restore()
        self.recorder.cede("the script handles its ranks itself", "init_process_group", where)
        for cede in self.on_cede:
            cede()

    # --- roots

    def _meet(self, root: Root, module: nn.Module) -> None:
        """Broadcast a root's parameters and buffers before its first call."""
        if not self.recorder.live:
            return
        if self._must_run_whole() or any(map(_has_no_numbers, parameters_of(module))):
            self._unmet.add(module)
            if any(p.is_meta for p in parameters_of(module)):
                self.recorder.pass_over(root.name, "it is on the meta device: a dry run")
            return
        self._join()
        self._same_line.check(f"call {root.name} for the first time")
        shapes = [f"{n} {tuple(p.shape)} {p.dtype}" for n, p in module.named_parameters()]
        self._consistency.compare_models(root.name, root.where, shapes)
        held = self._sharded and self._is_held(module)
        if not is_sharded(module):
            self._ranks.broadcast([*parameters_of(module), *module.buffers()])
        if held:
            self._begin_replica(root, module)

    def _join(self) -> None:
        self._ranks.join()
        if self._ranks.boardless:
            self.recorder.note(_BY_GLOO)

    def _is_held(self, module: nn.Module) -> bool:
        """True if a module stays on the host on any rank, where it is then put on all."""
        device = self._held.device_of(module)
        held = [text for text in self._ranks.gather(str(device or "")) if text]
        if held and device is None:
            self._held.hold(module, torch.device(held[0]))
        return bool(held)

    def _around(self, root: Root, module: nn.Module, call: Call) -> Call:
        if not self.recorder.live or self._must_run_whole():
            return call
        if self._unmet and module in self._unmet:
            if any(map(_has_no_numbers, parameters_of(module))):
                return call  # it creates its parameters, the same on all ranks, or is a dry run
            self._unmet.discard(module)
            self._meet(root, module)
        trains = torch.is_grad_enabled() and (
            root.trainable or any(p.requires_grad for p in parameters_of(module))
        )
        run = functools.partial(self._run, root, module, call)
        if self._sharded:
            COPIES.agree()
        if not trains:
            return self._without_training(root, module, run)
        if self._sharded:
            checks.check_own_parameters(root)
        registered, moved = self.splits.registered, self.splits.moved
        if root.replica is None:
            self._begin_replica(root, module)
        elif root.replica.moved != moved:
            root.replica.begin_again()
        elif registered.any_since(root.replica.registered, nn.Module.modules(module)):
            root.replica.look()
        root.replica.registered, root.replica.moved = registered.count, moved
        root.replica.uneven = True
        return functools.partial(self._trained, root, run)

    def _without_training(self, root: Root, module: nn.Module, run: Call) -> Call:
        self._even_out(root, module)
        if not self._sharded:
            return run
        if root.replica is not None:
            run = functools.partial(root.replica.evaluate, run)
        return out_of_inference_mode(run)

    def _trained(self, root: Root, run: Call, /, *args: Any, **kwargs: Any) -> Any:
        if self.splits.reentrant:
            root.replica.leave_ddp()
        if root.replica.calls_together:
            self._same_line.check(f"call {root.name}")
        return root.replica.call(run, args, kwargs)

    def _run(self, root: Root, module: nn.Module, call: Call, /, *args: Any, **kwargs: Any) -> Any:
        if self._splits_batches:
            return self.splits.run(root, module, call, args, kwargs)
        self.recorder.apply(root.name, root.where)
        parameter = root.parameter()
        with self._streams.for_forward(parameter.device if parameter is not None else None):
            return call(*args, **kwargs)

    def _begin_replica(self, root: Root, module: nn.Module) -> None:
        root.replica = self._replicate(root, module)
        self.passes.add(root.replica)

    def _replicate(self, root: Root, module: nn.Module) -> Replica | ShardedReplica:
        if not self._sharded:
            return Replica(module, self._ranks)
        checks.check_unsharded(root, module)
        device = self._held.device_of(module)
        replica = ShardedReplica(
            module, self._ranks, self._training.optimizers, self.recorder.note,
            device_type=device.type if device is not None else "",
            compiles=lambda: bool(self._compiled.where),
        )  # fmt: skip
        self._held.release(module)
        self.recorder.counts["sharded blocks"] += replica.blocks
        self.recorder.note(
            f"{root.name} is sharded in place from its first training call: parameters and"
            " gradients that the script refers to are shards; state_dict() returns whole ones"
        )
        return replica

    def _even_out(self, root: Root, module: nn.Module) -> None:
        """Broadcast rank 0's running statistics if each rank has trained on its own batches."""
        if not self._splits_batches and root.replica is not None and root.replica.uneven:
            root.replica.uneven = False
            self._same_line.check(f"call {root.name}")
            self._ranks.broadcast(list(module.buffers()))

    def _must_run_whole(self) -> bool:
        """True where code runs whole on each rank, since ranks can't communicate in it.

        Tensors in torch.func's transforms have no storage that they could be sent from.
        """
        inside = torch._C._functorch.peek_interpreter_stack() is not None
        return inside or not self._ranks.is_here()

    # --- backward passes

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self._is_outermost():
            self.passes.run(original, *args, **kwargs)
        else:
            original(*args, **kwargs)

    def _grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._is_outermost() or self._roots.inside.flag:
            return original(*args, **kwargs)
        return self.passes.gradients(original, *args, **kwargs)

    def _is_outermost(self) -> bool:
        inside = torch._C._current_graph_task_id() != -1 or self._must_run_whole()
        return not inside and self.recorder.live and self._ranks.joined

    # --- steps

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or not self._is_outermost():
            return
        self.recorder.counts["steps"] = steps = self.recorder.counts["steps"] + 1
        if steps == 1 and not self._splits_batches and not self.fed():
            self._streams.diverge()
            self.recorder.note(
                "no DataLoader feeds the training: from its second step on each rank draws its own"
                f" batches, so that the global batch is {self._ranks.world_size} times the script's"
            )
        if not steps & (steps - 1):
            self._same_line.check(f"step {type(optimizer).__name__}")
        self._consistency.after_step(steps, optimizer, sharded=self._sharded)


def _done_by(act: Callable[..., Any]) -> patching.Make:
    """Return what has another function called with the original and the arguments."""
    return lambda original: functools.wraps(original)(functools.partial(act, original))


@functools.cache
def _works_with_the_group(path: str) -> bool:
    """True for code of torch's, other than that which reads data, and for fasttrain's."""
    reads = path.startswith(f"{Path(torchs_data.__file__).parent}{os.sep}")
    return path.startswith((*own_prefixes(), "<frozen")) and not reads


def _has_no_numbers(parameter: Tensor) -> bool:
    """True if a parameter isn't made yet: a lazy module's before its first call, or one on meta."""
    return bool(is_lazy(parameter)) or parameter.is_meta
