"""What a rank's loss counts for in the loss of the whole batch.

The ranks average their gradients. For that to be the gradient of the script's loss over the whole
batch, each rank's loss is weighted: a mean by the rank's part of the samples, or of the tokens
that count; a sum by the number of ranks, which the average divides by. The same weights give the
loss of the whole batch.

What the ranks ask each other for that can be under way during the backward pass: a mean's weight
is then foretold from the pass before, and where the batch turns out to count for something else,
the gradients are put right by one factor. They are averaged by then, so that the factor must be
the same on all ranks: what a weight is foretold from are numbers that all of them were told, and
a rank that did not foretell when another one did divides its own weight by the factor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fasttrain.shim.asking import Asking
from fasttrain.shim.batches import Batches
from fasttrain.shim.known_losses import KnownLosses, Weighed
from fasttrain.shim.ranks import Ranks
from fasttrain.shim.reductions import Term, terms_of, torchs_mean
from fasttrain.shim.refusal import refuse
from fasttrain.shim.shares import Share
from fasttrain.shim.term_weights import (
    amounts_of,
    apply_factors,
    is_one_mean,
    of_means,
    weight_of,
)
from fasttrain.spec.errors import ExitCode, FasttrainError

CLOSE = 1e-12  # relative; a foretold weight that is off by rounding is right
_UNSEEN = [Term(None, "mean")]


@dataclass(slots=True)
class _Foretold:
    """A pass that has begun before its weight was known.

    Attributes:
        wait: Gives what the ranks are asked meanwhile: how many see one mean and how many have
            foretold; what the loss counts for on all of them; the sum of what it is there, so
            weighted.
        asked_s: Time that asking has taken this rank.
        total: Samples of the whole batch.
        whole: What they were thought to count for.
        weighed: What was made of it.
        like: Of the type and shape of the loss, where its value over all ranks is asked for.
    """

    wait: Callable[[], list[float]]
    asked_s: float
    total: int
    whole: float
    weighed: Weighed
    like: Tensor | None


class LossWeights:
    """Weighs the losses of one rank, each once.

    Attributes:
        values: Whether every weighing also gives the loss over all ranks.
        known: What was found for losses before.
        per_sample: What each sample counted for in the pass before, the same on all ranks; 0 before
            the first.
        needed: Whether the ranks had to be asked for the weights alone.
        asking: What the ranks are asked, and how long it took.
    """

    def __init__(self, ranks: Ranks, batches: Batches, *, values: bool = True) -> None:
        self.values = values
        self.needed = False
        self.asking = Asking(ranks)
        self._terms: dict[Any, Term] = {}  # of the last pass, whose graph may be freed
        self._ranks = ranks
        self._batches = batches
        self.known = KnownLosses()
        self.per_sample = 0.0
        self._open: _Foretold | None = None
        self._owed = 1.0  # the factor of this pass where other ranks have foretold

    def weigh(self, losses: Sequence[Tensor], *, value: bool, early: bool = False) -> list[Weighed]:
        """Weigh losses from which one backward pass begins; every rank must call this alike.

        Args:
            losses: Scalars with their graphs.
            value: Whether the losses over all ranks are wanted.
            early: Whether `settle` is going to be called behind the pass, so that a weight may be
                foretold until then.

        Raises:
            SystemExit: ``ranks-losses`` when other ranks have foretold and this one can't follow.
        """
        self.settle()
        found = [self.known.get(loss) for loss in losses]
        if all(known is not None and (known.value is not None or not value) for known in found):
            return [known for known in found if known is not None]
        weighed = self._weigh(losses, value=value, early=early)
        for loss, result in zip(losses, weighed, strict=True):
            self.known.keep(loss, result)
        return weighed

    def weigh_early(self, loss: Tensor) -> Weighed | None:
        """Weigh the loss of one pass as `weigh` does, where that takes next to nothing.

        What is done at every step is met with cold caches, so that each function that is called
        costs microseconds: here there are few.

        Returns:
            None where a closer look is needed, and nothing has been done.
        """
        share = self._batches.share
        if not self.per_sample or share is None or not share.count or self._open is not None:
            return None
        over = torchs_mean(loss.grad_fn) if loss.is_cpu and self.known.get(loss) is None else None
        if over is None:
            return None
        return self._foretell(loss, Term(loss.grad_fn, "mean", over), share, value=self.values)

    def settle(self) -> float:
        """Wait for what was asked; give what the gradients of the pass are to be multiplied by."""
        foretold = self._open
        if foretold is None:
            owed, self._owed = self._owed, 1.0
            return owed
        self._open = None
        begun_s = time.perf_counter()
        _, _, whole, amount = foretold.wait()
        self.asking.times_s.append(foretold.asked_s + time.perf_counter() - begun_s)
        self.per_sample = whole / foretold.total
        ratio = _ratio(foretold.whole, whole)
        if foretold.like is not None:  # of nothing it is nan, as torch's own mean
            value = amount / whole if whole else math.nan
            foretold.weighed.value = torch.full_like(foretold.like, value)
        return ratio

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

    def _weigh(self, losses: Sequence[Tensor], *, value: bool, early: bool) -> list[Weighed]:
        if self._batches.current == "whole":
            return [Weighed(value=loss.detach().clone() if value else None) for loss in losses]
        share = self._batches.share or Share(1, self._ranks.world_size)  # a batch of each rank's
        count, total = max(share.count, 1), share.total
        terms = [terms_of(loss, count, total, self._terms) or _UNSEEN for loss in losses]
        self.needed = any(isinstance(term.weight, Tensor) for parts in terms for term in parts)
        if not (value or self.needed):
            each = [(parts, [self._plain(term, share) for term in parts]) for parts in terms]
            return [Weighed(apply_factors(*one)) for one in each]
        if early and self.per_sample and is_one_mean(losses, terms):
            return [self._foretell(losses[0], terms[0][0], share, value=value)]
        return self._together(losses, terms, share, value=value, early=early)

    def _foretell(self, loss: Tensor, term: Term, share: Share, *, value: bool) -> Weighed:
        """Weigh one mean as its batch would count if it were as the one before.

        In numbers of Python's, because every operation on a tensor takes microseconds.
        """
        begun_s = time.perf_counter()
        weight = float(share.count if term.weight is None else term.weight) if share.count else 0.0
        like = loss.detach() if value else None
        amount = float(like) * weight if like is not None and weight > 0 else 0.0
        wait = self._ranks.begin_sum((1.0, 1.0, weight, amount))
        self._terms[term.node] = term
        whole = self.per_sample * share.total
        weighed = Weighed(weight * self._ranks.world_size / whole)
        asked_s = time.perf_counter() - begun_s
        self._open = _Foretold(wait, asked_s, share.total, whole, weighed, like)
        self.known.keep(loss, weighed)
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

    def _together(
        self,
        losses: Sequence[Tensor],
        terms: list[list[Term]],
        share: Share,
        *,
        value: bool,
        early: bool,
    ) -> list[Weighed]:
        """Add up the weights over the ranks, and with them the losses."""
        flat = [term for parts in terms for term in parts]
        weights = torch.stack([weight_of(term, share, losses[0]) for term in flat])
        amounts = torch.cat([amounts_of(*each) for each in zip(losses, terms, strict=True)])
        # What counts nothing may be anything, such as the nan of a mean over no token.
        amounts = torch.where(weights > 0, amounts.to(weights.dtype) * weights, 0.0)
        both = torch.stack([of_means(weights, flat), amounts])
        told = self.asking.together(both, one_mean=is_one_mean(losses, terms))
        self._terms.update((t.node, t) for t in flat if t.node is not None)
        if told.foretold:
            self._owed = self._common_factor(float(told.sums[0, 0]), share, early=early)
        if told.means is not None:
            self.per_sample = float(told.sums[0, 0]) / share.total
        result, at = [], 0
        for loss, parts in zip(losses, terms, strict=True):
            here = slice(at, at + len(parts))
            at += len(parts)
            factors = self._factors(parts, weights[here], told.sums[0, here], share)
            result.append(Weighed(apply_factors(parts, factors)))
            if value:
                # A rank on which nothing counts may take the sum of nothing for its part of a mean.
                of_sums = told.means == 0 or told.means is None or len(flat) > 1
                total = self._value(parts, told.sums[:, here], of_sums=of_sums)
                result[-1].value = total.to(loss.dtype).reshape(loss.shape)
        return result

    def _factors(
        self, parts: list[Term], weights: Tensor, whole: Tensor, share: Share
    ) -> list[Tensor | float]:
        """Give the factors of the terms of a loss, from what they count for on all ranks."""
        shares = weights * self._ranks.world_size / whole.clamp(min=1e-30)
        return [
            (shares[i] if term.kind == "mean" else self._plain(term, share)) / self._owed
            for i, term in enumerate(parts)
        ]

    def _value(self, parts: list[Term], sums: Tensor, *, of_sums: bool) -> Tensor:
        """Give a loss over all ranks."""
        is_sum = torch.tensor([of_sums and t.kind == "sum" for t in parts], device=sums.device)
        # Of batches that each rank drew by itself, a sum stays as large as the script's.
        over_sum = 1.0 if self._batches.share is not None else float(self._ranks.world_size)
        return (sums[1] / torch.where(is_sum, over_sum, sums[0])).sum()  # 0 / 0 is torch's nan

    def _common_factor(self, whole: float, share: Share, *, early: bool) -> float:
        """Give what all ranks will multiply their gradients by, some having foretold."""
        factor = _ratio(self.per_sample * share.total, whole)
        if factor != 1.0 and not early:
            refuse(_gradients_differ())
        return factor


def _ratio(foretold: float, whole: float) -> float:
    """Give what puts a foretold weight right; where nothing counts there is nothing to put."""
    ratio = foretold / whole if whole else 1.0
    return 1.0 if abs(ratio - 1.0) < CLOSE else ratio


def _gradients_differ() -> FasttrainError:
    return FasttrainError(
        "the ranks weighed one loss differently: this rank had gradients before the backward pass,"
        " and others had none",
        why="the samples counted for something else than in the pass before, which can't be put"
        " right in gradients of two passes",
        fix="let every rank clear its gradients at the same steps, or use --strategy none",
        slug="ranks-losses",
        exit_code=ExitCode.CONTRADICTION,
    )
