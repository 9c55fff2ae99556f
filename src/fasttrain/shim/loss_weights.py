"""What a rank's loss counts for in the loss of the whole batch.

The ranks average their gradients. For that to be the gradient of the script's loss over the whole
batch, each rank's loss is weighted: a mean by the rank's part of the samples, or of the tokens
that count; a sum by the number of ranks, which the average divides by. The same weights give the
loss of the whole batch.

What the ranks ask each other for that can be under way during the backward pass: a mean's weight
is then foretold from the pass before, and where the batch turns out to count for something else,
the gradients are put right by one factor.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fasttrain.shim.batches import Batches
from fasttrain.shim.ranks import NUMBERS, Ranks
from fasttrain.shim.reductions import Term, terms_of
from fasttrain.shim.shares import Share

TIMES = 32  # kept, of the latest
CLOSE = 1e-12  # relative; a foretold weight that is off by rounding is right


@dataclass(slots=True)
class Weighed:
    """One loss of this rank.

    Attributes:
        factor: What its gradient is to be multiplied by before the ranks average.
        value: The loss over all ranks, on the loss's device; None where it was not asked for.
    """

    factor: Tensor | float = 1.0
    value: Tensor | None = None


@dataclass(slots=True)
class _Question:
    """What the ranks are asked about the losses of one pass.

    Attributes:
        wait: Gives, term by term, what it counts for on all ranks and the sum of what it is there,
            so weighted.
        asked_s: Time that asking has taken this rank.
    """

    wait: Callable[[], list[float]]
    asked_s: float


@dataclass(slots=True)
class _Foretold:
    """A pass that has begun before its weight was known.

    Attributes:
        question: What the ranks are asked meanwhile.
        total: Samples of the whole batch.
        whole: What they were thought to count for.
        weighed: What was made of it.
        like: Of the type and shape of the loss, where its value over all ranks is asked for.
    """

    question: _Question
    total: int
    whole: float
    weighed: Weighed
    like: Tensor | None


class LossWeights:
    """Weighs the losses of one rank, each once.

    Attributes:
        values: Whether every weighing also gives the loss over all ranks.
        needed: Whether the ranks had to be asked for the weights alone.
        times_s: What asking them took, in seconds.
    """

    def __init__(self, ranks: Ranks, batches: Batches, *, values: bool = True) -> None:
        self.values = values
        self.needed = False
        self.times_s: deque[float] = deque(maxlen=TIMES)
        self._terms: dict[Any, Term] = {}  # of the last pass, whose graph may be freed
        self._ranks = ranks
        self._batches = batches
        self._known: dict[int, tuple[weakref.ref[Tensor], Weighed]] = {}
        self._per_sample: float | None = None  # what each counted for in the pass before
        self._open: _Foretold | None = None

    def known(self, loss: Tensor) -> Weighed | None:
        """Give what was found for a loss before."""
        found = self._known.get(id(loss))
        return found[1] if found is not None and found[0]() is loss else None

    def weigh(self, losses: Sequence[Tensor], *, value: bool, early: bool = False) -> list[Weighed]:
        """Weigh losses from which one backward pass begins; every rank must call this alike.

        Args:
            losses: Scalars with their graphs.
            value: Whether the losses over all ranks are wanted.
            early: Whether `settle` is going to be called behind the pass, so that a weight may be
                foretold until then.
        """
        self.settle()
        found = [self.known(loss) for loss in losses]
        if all(known is not None and (known.value is not None or not value) for known in found):
            return [known for known in found if known is not None]
        weighed = self._weigh(losses, value=value, early=early)
        for loss, result in zip(losses, weighed, strict=True):
            key = id(loss)
            self._known[key] = (weakref.ref(loss, partial(self._forget, key)), result)
        return weighed

    def settle(self) -> float:
        """Wait for what was asked; give what the gradients of the pass are to be multiplied by."""
        foretold, self._open = self._open, None
        if foretold is None:
            return 1.0
        whole, amount = self._answer(foretold.question)
        self._per_sample = whole / foretold.total
        if not whole:
            amount, whole = math.nan, foretold.whole  # as torch's own mean over nothing
        if foretold.like is not None:
            foretold.weighed.value = torch.full_like(foretold.like, amount / whole)
        ratio = foretold.whole / whole
        return 1.0 if abs(ratio - 1.0) < CLOSE else ratio

    def begin_pass(self) -> None:
        """Forget the terms of the pass before, whose nodes would be kept alive."""
        self._terms.clear()

    def is_loss(self, tensor: Tensor) -> bool:
        """Whether a number was reduced over samples that the ranks share, as far as can be seen."""
        if self._batches.current == "whole":
            return False
        share = self._batches.share or Share(1, self._ranks.world_size)
        terms = terms_of(tensor, max(share.count, 1), share.total, self._terms)
        return any(term.kind != "same" for term in terms)

    def _forget(self, key: int, ref: Any) -> None:
        if key in self._known and self._known[key][0] is ref:
            del self._known[key]

    def _weigh(self, losses: Sequence[Tensor], *, value: bool, early: bool) -> list[Weighed]:
        if self._batches.current == "whole":
            return [Weighed(value=loss.detach().clone() if value else None) for loss in losses]
        share = self._batches.share or Share(1, self._ranks.world_size)  # a batch of each rank's
        terms = [
            terms_of(loss, max(share.count, 1), share.total, self._terms) or [Term(None, "mean")]
            for loss in losses
        ]
        counted = any(isinstance(term.weight, Tensor) for parts in terms for term in parts)
        self.needed = counted
        if not (value or counted):
            return [self._factors(parts, [self._plain(t, share) for t in parts]) for parts in terms]
        if early and self._per_sample and _is_one_mean(losses, terms):
            return [self._foretell(losses[0], terms[0][0], share, value=value)]
        return self._together(losses, terms, share, value=value)

    def _foretell(self, loss: Tensor, term: Term, share: Share, *, value: bool) -> Weighed:
        """Weigh one mean as its batch would count if it were as the one before.

        In numbers of Python's, because every operation on a tensor takes microseconds.
        """
        begun_s = time.perf_counter()
        like, weight = loss.detach(), float(share.count if term.weight is None else term.weight)
        weight *= bool(share.count)
        amount = float(like) * weight if weight > 0 else 0.0
        question = self._ask([weight, amount], begun_s)
        self._terms[term.node] = term
        whole = (self._per_sample or 1.0) * share.total
        weighed = Weighed(weight * self._ranks.world_size / whole)
        self._open = _Foretold(question, share.total, whole, weighed, like if value else None)
        return weighed

    def _plain(self, term: Term, share: Share) -> float:
        """Give the factor of a term without asking the other ranks."""
        if term.kind == "same":
            return 1.0
        if term.kind == "sum":
            # Of batches that each rank drew by itself, a sum stays as large as the script's.
            own = 1.0 if self._batches.share is None else float(self._ranks.world_size)
            return own * bool(share.count)
        return share.count * self._ranks.world_size / share.total

    def _weight(self, term: Term, share: Share, like: Tensor) -> Tensor:
        """Give what a term counts for against the same one of another rank."""
        # Accelerators are slow in fp64, and hccl adds up none.
        dtype = torch.float64 if like.device.type == "cpu" else torch.float32
        if isinstance(term.weight, Tensor) and share.count:
            return term.weight.detach().to(like.device, dtype)
        own = share.count if term.weight is None else float(term.weight) * bool(share.count)
        own = float(bool(share.count)) if term.kind == "sum" else own
        own = 1.0 if term.kind == "same" else own
        return torch.tensor(own, dtype=dtype, device=like.device)

    def _together(
        self, losses: Sequence[Tensor], terms: list[list[Term]], share: Share, *, value: bool
    ) -> list[Weighed]:
        """Add up the weights over the ranks, and with them the losses."""
        begun_s = time.perf_counter()
        flat = [term for parts in terms for term in parts]
        weights = torch.stack([self._weight(term, share, losses[0]) for term in flat])
        amounts = torch.cat([_amounts(*each) for each in zip(losses, terms, strict=True)])
        # What counts nothing may be anything, such as the nan of a mean over no token.
        amounts = torch.where(weights > 0, amounts.to(weights.dtype) * weights, 0.0)
        sums = self._sums(torch.stack([weights, amounts]), begun_s)
        self._terms.update((t.node, t) for t in flat if t.node is not None)
        if _is_one_mean(losses, terms):
            self._per_sample = float(sums[0, 0]) / share.total
        result, at = [], 0
        for loss, parts in zip(losses, terms, strict=True):
            here = slice(at, at + len(parts))
            at += len(parts)
            whole = sums[0, here].clamp(min=1e-30)
            shares = weights[here] * self._ranks.world_size / whole
            factors = [
                shares[i] if term.kind == "mean" else self._plain(term, share)
                for i, term in enumerate(parts)
            ]
            result.append(self._factors(parts, factors))
            if value:
                is_sum = torch.tensor([t.kind == "sum" for t in parts], device=whole.device)
                over = torch.where(is_sum, self._over_sum(), sums[0, here])  # 0 / 0 is torch's nan
                total = (sums[1, here] / over).sum()
                result[-1].value = total.to(loss.dtype).reshape(loss.shape)
        return result

    def _sums(self, both: Tensor, begun_s: float) -> Tensor:
        """Give the sums of (2, terms) numbers over the ranks."""
        if both.device.type == "cpu":
            told = self._answer(self._ask(both.T.flatten().tolist(), begun_s))
            return torch.tensor(told, dtype=both.dtype).view(-1, 2).T
        # Of one size, so that ranks whose losses have more or fewer terms don't wait for ever.
        padded = torch.zeros(2, NUMBERS // 2, dtype=both.dtype, device=both.device)
        padded[:, : both.size(1)] = both
        sums = self._ranks.sum(padded)[:, : both.size(1)]
        self.times_s.append(time.perf_counter() - begun_s)
        return sums

    def _ask(self, numbers: list[float], begun_s: float) -> _Question:
        return _Question(self._ranks.begin_sum(numbers), time.perf_counter() - begun_s)

    def _answer(self, question: _Question) -> list[float]:
        begun_s = time.perf_counter()
        sums = question.wait()
        self.times_s.append(question.asked_s + time.perf_counter() - begun_s)
        return sums

    def _over_sum(self) -> float:
        """Give what the sum of a sum over all ranks is divided by."""
        return 1.0 if self._batches.share is not None else float(self._ranks.world_size)

    def _factors(self, parts: list[Term], factors: list[Any]) -> Weighed:
        """Give one factor for a loss; where its terms differ, put each on its own term."""
        if len(parts) == 1 or _all_equal(parts, factors):
            return Weighed(factors[0])
        for term, factor in zip(parts, factors, strict=True):
            term.node.register_prehook(partial(_multiplied, factor))
        return Weighed(1.0)


def _is_one_mean(losses: Sequence[Tensor], terms: list[list[Term]]) -> bool:
    """Whether one factor puts a pass right; on a GPU the host doesn't wait for sums anyway."""
    parts = terms[0]
    one = len(losses) == len(parts) == 1 and parts[0].kind == "mean"
    return one and parts[0].node is not None and losses[0].device.type == "cpu"


def _all_equal(parts: list[Term], factors: list[Any]) -> bool:
    """Whether all terms have one factor, as far as can be seen without waiting for a GPU."""
    if all(isinstance(factor, float) or factor.device.type == "cpu" for factor in factors):
        return len({float(factor) for factor in factors}) == 1
    numbers = {None if isinstance(t.weight, Tensor) else t.weight for t in parts}
    return len(numbers) == 1 and None not in numbers and all(t.kind == "mean" for t in parts)


def _amounts(loss: Tensor, parts: list[Term]) -> Tensor:
    """Give what each term contributes to a loss; what can't be found is the first one's."""
    found = [None if len(parts) == 1 else term.value() for term in parts]
    rest = loss.detach().reshape(()) - sum(value for value in found if value is not None)
    unknown = next((i for i, value in enumerate(found) if value is None), 0)
    values = [torch.zeros_like(rest) if value is None else value.reshape(()) for value in found]
    values[unknown] = values[unknown] + rest
    return torch.stack([value.to(rest.dtype) for value in values])


def _multiplied(factor: Tensor | float, gradients: tuple[Tensor | None, ...]) -> Any:
    return tuple(None if g is None else (g * factor).to(g.dtype) for g in gradients)
