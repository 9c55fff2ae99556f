"""Makes the losses that the script reads those of all ranks.

Behind a backward pass the loss tensor itself is given the value over all ranks, so that whatever
the script does with it then, printing, adding up, keeping, is what one process does. A loss that
is read before its backward pass is put together when ``item()``, ``float()`` or a format asks.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from fasttrain.shim.ledger import Ledger
from fasttrain.shim.parallel_context import ParallelContext
from fasttrain.shim.reductions import TOLD
from fasttrain.spec.outcome import State

MOST_OF_A_STEP = 0.01  # what adding the losses up may cost before it is told
TRIAL_STEPS = 20


class ReduceLoss:
    """Puts the ranks' losses together."""

    def __init__(self, ledger: Ledger, context: ParallelContext) -> None:
        self.ledger = ledger
        self._choice = context.strategy.reduce_loss
        self._ranks = context.ranks
        self._weights = context.weights
        self._step_s: list[float] | None = []  # None when it has been decided
        self._last_s = time.perf_counter()

    def install(self, undo: ExitStack) -> None:
        """Follow backward passes, and what reads one number."""
        for name in ("item", "__float__", "__format__"):
            self._watch(name, undo)
        if self._choice == "auto":
            undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self.ledger.settle(State.ARMED, "no loss was computed")

    def refresh(self) -> None:
        """Nothing is pending: every loss is counted as it is put together."""

    def _watch(self, name: str, undo: ExitStack) -> None:
        original: Any = getattr(Tensor, name)

        @functools.wraps(original)
        def read(tensor: Tensor, *args: Any) -> Any:
            if tensor.grad_fn is None or tensor.numel() != 1 or not self.ledger.live:
                return original(tensor, *args)
            return original(self._over_ranks(tensor), *args)

        if name in vars(Tensor):
            undo.callback(setattr, Tensor, name, original)
        else:  # inherited: taking ours away brings torch's back
            undo.callback(delattr, Tensor, name)
        setattr(Tensor, name, read)

    def _over_ranks(self, tensor: Tensor) -> Tensor:
        if not self._ranks.joined or not tensor.is_floating_point():
            return tensor
        known = self._weights.known.get(tensor)
        if known is None and not self._weights.is_loss(tensor):
            return tensor  # such as what a model says about one sample
        with self._ranks.waits():
            value = self._weights.weigh((tensor,), value=True)[0].value
        return tensor if value is None else value

    def _after_step(self, *_: Any) -> None:
        """Behind a few steps, tell what putting each loss together costs."""
        if torch.compiler.is_compiling() or not self._ranks.joined or self._step_s is None:
            return
        now = time.perf_counter()
        self._step_s.append(now - self._last_s)
        self._last_s = now
        if len(self._step_s) > TRIAL_STEPS:
            self._decide(statistics.median(self._step_s))
            self._step_s = None

    def _decide(self, step_s: float) -> None:
        times_s = self._weights.asking.times_s
        # The rank that comes last doesn't wait for others: its time is what the sum itself takes.
        told = torch.tensor([statistics.median(times_s) if times_s else 0.0, step_s])
        dist.all_reduce(told, dist.ReduceOp.MIN)
        share = float(told[0] / told[1])
        self.ledger.counts["us each"] = round(1e6 * float(told[0]))
        if share > MOST_OF_A_STEP and not self._weights.needed:
            self.ledger.note(
                f"adding a loss up over the ranks takes {share:.1%} of a step; with"
                " --reduce-loss off each rank keeps its own"
            )

    def after_backward(self, losses: Sequence[Tensor], freed: bool) -> None:
        """Give the losses of a pass their value over all ranks."""
        for loss in losses:
            weighed = self._weights.known.get(loss)
            if weighed is None or weighed.value is None:
                continue
            self.ledger.apply("loss", "")
            self.ledger.counts["losses"] += 1
            if freed and not loss._is_view():
                loss.data.copy_(weighed.value)
                node: Any = loss.grad_fn
                if node is not None:  # what is made of it from here on is of all ranks too
                    node.metadata[TOLD] = True
