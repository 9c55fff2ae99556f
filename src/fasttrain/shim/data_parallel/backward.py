"""Averages over the ranks the gradients that each backward pass leaves."""

from __future__ import annotations

import functools
import itertools
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fasttrain.shim.data_parallel.context import ParallelContext
from fasttrain.shim.data_parallel.rank_consistency import SameLine
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.data_parallel.replica import Replica, average_gradients
from fasttrain.shim.data_parallel.shards.replica import ShardedReplica
from fasttrain.shim.data_parallel.split.rows import mean_gradient
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.gradients import ends_of, inputs_of, named_as
from fasttrain.shim.hooks.loop import TrainingState
from fasttrain.shim.hooks.seams import Hooking
from fasttrain.shim.process.held_signals import held_signals

# Detects gradients w.r.t. a tensor that a model returns along with a result of it, such as a
# loss.
#
# In a split call the script gets a gathered copy of such a tensor. The model computed the loss
# from the rank's rows and not from the copy, so that a gradient w.r.t. the copy, or a hook on it,
# would lack the loss's part. A script that asks for such a gradient in a verified call, which
# runs on the whole batch, has its model called with the whole batch from then on. One that first
# asks later is ended with an error.


_ASKED = "fasttrain: returned with its result"  # key in the metadata of a tensor's autograd node


def mark(tensors: Iterable[Tensor], asked: Callable[[], None]) -> None:
    """Have a function called when the script asks for a gradient w.r.t. one of these tensors."""
    for tensor in tensors:
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata[_ASKED] = asked


def see(tensors: Iterable[Any]) -> None:
    """Call the functions of marked tensors: the script asks for gradients w.r.t. these."""
    for tensor in tensors:
        node: Any = tensor.grad_fn if isinstance(tensor, Tensor) else None
        if node is not None and (asked := node.metadata.get(_ASKED)) is not None:
            asked()


def install(undo: ExitStack) -> None:
    """Watch for hooks on tensors and for ``retain_grad()``."""
    for name in ("register_hook", "retain_grad"):
        patching.wrap(Tensor, name, _seen, undo, Hooking.SPLIT)


def _seen(original: Any) -> Any:
    @functools.wraps(original)
    def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.grad_fn is not None:
            see((tensor,))
        return original(tensor, *args, **kwargs)

    return method


# Averages over the ranks the gradients that each backward pass leaves.


class BackwardPasses:
    """Wraps backward passes of ranks that train one model."""

    def __init__(self, context: ParallelContext) -> None:
        self._ranks = context.ranks
        self._same_line = SameLine(context.ranks)
        self._display = context.strategy.batch == "per-rank"
        self._unowned = UnownedParameters(context.ranks, context.training)
        self._replicas: list[weakref.ref[Replica | ShardedReplica]] = []
        self._added = 0
        self._derived = False  # whether the script has derivatives of which it asks for others

    def add(self, replica: Replica | ShardedReplica) -> None:
        """Average the gradients of a root from now on, as long as it lives."""
        self._replicas.append(weakref.ref(replica))
        self._added += 1

    def run(
        self,
        original: Callable[..., Any],
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        """Run a backward pass by ``original``, `torch.autograd.backward`, with its arguments."""
        if inputs is not None:
            inputs = inputs_of(inputs)
            see(inputs)
        ends = ends_of(tensors)
        losses = [end for end in ends if isinstance(end, Tensor)]
        replicas = self._living()
        # A pass is one call of C++, and a signal's handler comes behind it, also that of Ctrl-C.
        # One that raised inside of a hook in Python would leave torch's reducer in the middle.
        held = nullcontext() if self._ranks.means is None else held_signals(signal.SIGINT)
        with held, self._ranks.waits():
            if not self._display:
                on_host = [t for t in losses if t.numel() == 1 and t.is_cpu and not t.is_complex()]
                self._same_line.check("call backward", [t.detach() for t in on_host])
            for replica in replicas:
                if create_graph:
                    replica.leave_ddp()
                replica.begin_pass()
                if self._derived and isinstance(replica, ShardedReplica):
                    replica.gather_first(losses)
            original(ends, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            replicas = self._living()  # also of roots that were first called in this pass
            for replica in replicas:
                replica.after_backward()
            self._average_unowned(replicas)
            if retain_graph or create_graph:
                # Another backward pass may use the same graph without a forward call before it.
                for replica in replicas:
                    replica.watch()
            elif self._display:
                self._average_values(losses)

    def _average_unowned(self, replicas: Sequence[Replica | ShardedReplica]) -> None:
        self._unowned.find(replicas, self._added)
        if self._unowned.parameters:
            average_gradients(self._unowned.parameters, self._ranks)

    def gradients(
        self, original: Callable[..., Any], outputs: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return `torch.autograd.grad`'s result, averaged over the ranks for parameters."""
        of = inputs_of(inputs)
        see(of)
        for replica in self._living():
            if isinstance(replica, Replica):
                replica.average_before_hooks()
        found = original(outputs, of, *args, **kwargs)
        self._derived |= any(t is not None and t.requires_grad for t in found)
        if self._unowned.is_stale(self._added):
            self._same_line.check("call torch.autograd.grad")
            self._unowned.find(self._living(), self._added)
        trained = {id(parameter) for parameter in self._trained()}
        own = [at for at, tensor in enumerate(of) if id(tensor) in trained]
        if not own:
            return named_as(inputs, found)
        means = list(found)
        self._same_line.check("call torch.autograd.grad")
        with self._ranks.waits():
            have = [float(found[at] is not None) for at in own]
            counts = self._ranks.sum(torch.tensor(have, device="cpu")).tolist()
            for at, count in zip(own, counts, strict=True):
                if count:
                    gradient = torch.zeros_like(of[at]) if found[at] is None else found[at]
                    means[at] = mean_gradient(gradient, self._ranks)
        return named_as(inputs, tuple(means))

    def _living(self) -> list[Replica | ShardedReplica]:
        found = [replica for ref in self._replicas if (replica := ref()) is not None]
        if len(found) != len(self._replicas):
            self._replicas = [weakref.ref(replica) for replica in found]
        return found

    def _average_values(self, losses: Sequence[Tensor]) -> None:
        """Replace displayed losses by their means: each rank trains on its own batches."""
        for loss in losses:
            if loss.numel() == 1 and not loss._is_view():
                loss.data.copy_(self._ranks.sum(loss.detach() / self._ranks.world_size))

    def unowned(self) -> set[int]:
        """Return the ids of parameters that no root owns and whose gradients are averaged."""
        return self._unowned.ids(self._living())

    def _trained(self) -> Iterator[Tensor]:
        groups = [replica.parameters for replica in self._living()]
        return itertools.chain(*groups, self._unowned.parameters)


class UnownedParameters:
    """Averages gradients of parameters that no root owns, such as a bare temperature.

    Optimizers and roots that the script has dropped live on until Python's garbage collector finds
    them, which is at another time on each rank. So it is by what the script does that they are
    searched, and what all ranks have found that counts.

    Attributes:
        parameters: Those found in the last search.
    """

    def __init__(self, ranks: Ranks, training: TrainingState) -> None:
        self._ranks = ranks
        self._training = training
        self.parameters: list[Tensor] = []
        self._made = (-1, -1)  # optimizers and roots
        self._sizes: list[tuple[weakref.ref[Optimizer], int]] = []

    def find(self, roots: Sequence[Replica | ShardedReplica], made: int) -> None:
        """Search for the parameters again, if there may be others.

        Args:
            roots: The replicas of the roots.
            made: Number of roots so far.
        """
        if self.is_stale(made):
            self._made = (self._training.made, made)
            self._search(roots)

    def is_stale(self, made: int) -> bool:
        """True if optimizers or roots were made since the last search, or optimizers have grown."""
        return self._made != (self._training.made, made) or self._has_grown()

    def ids(self, roots: Sequence[Replica | ShardedReplica]) -> set[int]:
        """Return the ids of those that a search would find now on this rank."""
        of_roots = {id(p) for root in roots for p in root.parameters}
        return self._training.trained() - of_roots

    def _has_grown(self) -> bool:
        """True if the script has changed the number of an optimizer's parameters."""
        return any((o := ref()) is not None and _size(o) != size for ref, size in self._sizes)

    def _search(self, roots: Sequence[Replica | ShardedReplica]) -> None:
        own = self.ids(roots)
        optimizers = self._training.numbered()
        self._sizes = [(weakref.ref(optimizer), _size(optimizer)) for _, optimizer in optimizers]
        found = {
            f"{number}.{at}": p
            for number, optimizer in optimizers
            for at, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
            if id(p) in own
        }
        of_ranks = [set(text.split()) for text in self._ranks.gather(" ".join(found))]
        shared = set.intersection(*of_ranks)
        before = {id(p) for p in self.parameters}
        self.parameters = list({id(p): p for key, p in found.items() if key in shared}.values())
        self._ranks.broadcast([p for p in self.parameters if id(p) not in before])


def _size(optimizer: Optimizer) -> int:
    return sum([len(group["params"]) for group in optimizer.param_groups])
