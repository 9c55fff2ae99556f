"""Backward passes of ranks that train one model, and what they leave in the gradients."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fasttrain.shim.data_parallel.context import ParallelContext
from fasttrain.shim.data_parallel.inner_gradients import see
from fasttrain.shim.data_parallel.parting import Parting
from fasttrain.shim.data_parallel.replica import Replica
from fasttrain.shim.data_parallel.sharded import ShardedReplica
from fasttrain.shim.data_parallel.split.rows import mean_gradient
from fasttrain.shim.data_parallel.unowned_parameters import StrayParameters


class Passes:
    """Averages over the ranks what each backward pass leaves."""

    def __init__(self, context: ParallelContext) -> None:
        self._ranks = context.ranks
        self._parting = Parting(context.ranks)
        self._display = context.strategy.batch == "per-rank"
        self._strays = StrayParameters(context.ranks, context.training)
        self._replicas: list[weakref.ref[Replica | ShardedReplica]] = []

    def add(self, replica: Replica | ShardedReplica) -> None:
        """Average the gradients of a root from now on, for as long as it lives."""
        self._replicas.append(weakref.ref(replica))

    def run(
        self,
        original: Callable[..., Any],
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Make one pass, with the arguments of `torch.autograd.backward` behind that itself."""
        asked = kwargs.get("inputs") or ()
        see((asked,) if isinstance(asked, Tensor) else asked)
        losses = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        replicas = self._living()
        with self._ranks.waits():
            if not self._display:
                on_host = [t for t in losses if t.numel() == 1 and t.is_cpu and not t.is_complex()]
                self._parting.check("call backward", [t.detach() for t in on_host])
            for replica in replicas:
                if create_graph:
                    replica.leave_ddp()
                replica.begin_pass()
            original(losses, grad_tensors, retain_graph, create_graph, *args, **kwargs)
            for replica in replicas:
                replica.after_backward()
            self._strays.after_backward(replicas)
            if retain_graph or create_graph:
                # Another pass may go through the same graphs, without a call before it.
                for replica in replicas:
                    replica.watch()
            elif self._display:
                self._average_values(losses)

    def gradients(
        self, original: Callable[..., Any], outputs: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return what `torch.autograd.grad` does, of parameters the mean over the ranks."""
        several = not isinstance(inputs, Tensor)
        of = tuple(inputs) if several else (inputs,)
        see(of)
        found = original(outputs, of if several else inputs, *args, **kwargs)
        trained = {id(parameter) for parameter in self._trained()}
        own = [at for at, tensor in enumerate(of) if id(tensor) in trained]
        if not own:
            return found
        means = list(found)
        self._parting.check("call torch.autograd.grad")
        with self._ranks.waits():
            have = self._ranks.sum(torch.tensor([float(found[at] is not None) for at in own]))
            for at, count in zip(own, have.tolist(), strict=True):
                if count:
                    gradient = torch.zeros_like(of[at]) if found[at] is None else found[at]
                    means[at] = mean_gradient(gradient, self._ranks)
        return tuple(means)

    def _living(self) -> list[Replica | ShardedReplica]:
        found = [replica for ref in self._replicas if (replica := ref()) is not None]
        if len(found) != len(self._replicas):
            self._replicas = [weakref.ref(replica) for replica in found]
        return found

    def _average_values(self, losses: Sequence[Tensor]) -> None:
        """Have the script read losses over all ranks, which train on batches of their own."""
        for loss in losses:
            if loss.numel() == 1 and not loss._is_view():
                loss.data.copy_(self._ranks.sum(loss.detach() / self._ranks.world_size))

    def _trained(self) -> Iterator[Tensor]:
        groups = [replica.parameters for replica in self._living()]
        return itertools.chain(*groups, self._strays.parameters)
