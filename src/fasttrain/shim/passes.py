"""Backward passes of ranks that train one model, and what they leave in the gradients.

Each pass begins with the rank's weights of its losses, and behind it the gradients are the mean
over the ranks, those of the roots and those of parameters that belong to none.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fasttrain.shim.accumulation import Accumulation
from fasttrain.shim.parallel_context import ParallelContext
from fasttrain.shim.replica import Replica
from fasttrain.shim.sharded import ShardedReplica
from fasttrain.shim.stray_parameters import StrayParameters


class Passes:
    """Weighs the losses of each pass, and averages what it leaves.

    Attributes:
        accumulation: Which passes are the last ones before a step.
        after_backward: Called behind each pass with its losses, and whether their graphs are freed.
    """

    def __init__(self, context: ParallelContext) -> None:
        self.accumulation = Accumulation(enabled=context.accumulates)
        self.after_backward: list[Callable[[Sequence[Tensor], bool], None]] = []
        self._ranks = context.ranks
        self._weights = context.weights
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
        losses = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        replicas = self._living()
        with self._ranks.waits():
            early = not create_graph and self._begins_afresh(replicas)
            seeds = self._weighted(losses, grad_tensors, early=early)
            original(losses, seeds, retain_graph, create_graph, *args, **kwargs)
            average = self.accumulation.average_after_pass()
            for replica in replicas:
                replica.after_backward(average=average)
            self._strays.after_backward(replicas, average=average)
            factor = self._weights.settle()
            if factor != 1.0:
                self._multiply(factor)
        freed = not (retain_graph or create_graph)
        if not freed:  # another pass may go through the same graphs, without a call before it
            for replica in replicas:
                replica.watch()
        for listen in self.after_backward:
            listen(losses, freed)

    def flush(self) -> None:
        """Average what was left to a later pass."""
        for replica in self._living():
            if replica.pending:
                replica.average()
        self._strays.flush()

    def _living(self) -> list[Replica | ShardedReplica]:
        found = [replica for ref in self._replicas if (replica := ref()) is not None]
        if len(found) != len(self._replicas):
            self._replicas = [weakref.ref(replica) for replica in found]
        return found

    def _begins_afresh(self, replicas: Sequence[Replica | ShardedReplica]) -> bool:
        """Whether all gradients behind a pass will be its own, and nothing uses them before."""
        fresh = True
        for replica in replicas:
            fresh = replica.begin_pass() and fresh  # each is asked, and remembers it
        return fresh and all(p.grad is None for p in self._strays.parameters)

    def _weighted(self, losses: Sequence[Tensor], grad_tensors: Any, *, early: bool) -> Any:
        """Give what the pass begins with, so that the mean over the ranks is right."""
        for loss in losses:
            if loss.numel() != 1 or not loss.requires_grad:
                return grad_tensors
        if not losses:
            return grad_tensors
        weights = self._weights
        weights.begin_pass()
        if early and len(losses) == 1 and grad_tensors is None:
            quickly = weights.weigh_early(losses[0])
            if quickly is not None:
                return [_seed(losses[0], None, quickly)]
        weighed = weights.weigh(losses, value=weights.values, early=early)
        seeds = (None,) if grad_tensors is None else grad_tensors
        seeds = (seeds,) if isinstance(seeds, Tensor) else tuple(seeds)
        seeds = seeds if len(seeds) == len(losses) else (None,) * len(losses)
        return [_seed(*each) for each in zip(losses, seeds, weighed, strict=True)]

    def _multiply(self, factor: float) -> None:
        """Put right the gradients that a pass has left."""
        with torch.no_grad():
            for parameter in self._trained():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _trained(self) -> Iterator[Tensor]:
        seen: set[int] = set()  # a part may be a root as well
        groups = [replica.parameters for replica in self._living()]
        for parameter in itertools.chain(*groups, self._strays.parameters):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def _seed(loss: Tensor, seed: Tensor | None, weighed: Any) -> Tensor | None:
    factor = weighed.factor
    if isinstance(factor, float) and factor == 1.0:
        return seed
    if seed is None and isinstance(factor, float):
        return torch.full_like(loss, factor)
    if seed is None:
        seed = torch.ones_like(loss)
    return seed * (factor.to(seed.device, seed.dtype) if isinstance(factor, Tensor) else factor)
