"""Batches that itertools keeps, to give them again without asking a DataLoader.

In a replay it would keep those that stand in for others, and the loop would train on them later.
"""

from __future__ import annotations

import gc
from typing import Any

from fasttrain.model.errors import FasttrainError

_KEEPING = {"cycle": "itertools.cycle", "_tee_dataobject": "itertools.tee"}


class StoredError(Exception):
    """Some of what the loop will train on is held where it can't be found."""


def stored_by(iterators: list[Any]) -> str:
    """Give what of itertools keeps what one of these iterators gives; empty where nothing does.

    It looks through all that the garbage collector knows: a tenth of a second's work.
    """
    holders = gc.get_referrers(*iterators) if iterators else []
    kinds = [type(one).__name__ for one in holders if type(one).__module__ == "itertools"]
    return next((_KEEPING[kind] for kind in kinds if kind in _KEEPING), "")


def stored(by: str) -> FasttrainError:
    """Give the error for it."""
    return FasttrainError(
        "--preempt snapshot can't follow this loop",
        why=f"{by} keeps the batches of a DataLoader and gives them again, where they can't be"
        " brought back",
        fix="begin the loader again instead: while True: for batch in loader: yield batch",
        slug="snapshot-cycle",
    )
