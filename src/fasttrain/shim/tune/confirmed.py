"""Decides from the findings of some steps, and of all ranks, whether a lever is right.

What is compared with rounding in one step is a random draw. Where rounding decides on which side of
a kink a number is, a right lever is too far now and then: bf16 in 4 to 7 % of the calls of a small
MLP with ReLU and 8 to 32 rows (torch 2.13, CPU). Over eight ranks that would be every third.
So a rank that finds a lever wrong looks at two further steps. It is wrong if all three say so, and
right if two do. A lever is right if it is so on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fasttrain.model.tuning import Parity
from fasttrain.shim.tune.repeats import NO_CALL

LOOKS = 3  # at steps, of a rank that finds a lever wrong
MOST_LOOKS = 6  # a split call is made whole in some steps, in which nothing is found


def confirmed(looks: Sequence[Sequence[Parity]], *, last: bool = False) -> Parity | None:
    """Return what the findings come to; None if one more step is to be looked at.

    Args:
        looks: The finding of each rank, by step.
        last: Whether there is no time for a further one.
    """
    if not looks:
        return None
    last = last or len(looks) >= MOST_LOOKS
    by_rank = [_of_rank(found, last=last) for found in zip(*looks, strict=True)]
    settled = [one for one in by_rank if one is not None]
    if len(settled) < len(by_rank):
        return None
    return min(settled, key=lambda one: one.order)


def _of_rank(found: Sequence[Parity], *, last: bool) -> Parity | None:
    some = [one for one in found if not one.reason.endswith(NO_CALL)]
    if not some:
        return found[-1] if last else None
    wrong = [one for one in some if one.right is False]
    if some[0].right is not False:
        return some[0]
    if len(some) < LOOKS and not last:
        return None
    if len(wrong) == len(some):
        return min(wrong, key=lambda one: one.order)
    right = [one for one in some if one.right]
    if len(right) > len(wrong):
        return min(right, key=lambda one: one.order)
    times = f"in {len(wrong)} of {len(some)} steps"
    return replace(wrong[0], right=None, reason=f"{times} {wrong[0].reason}")
