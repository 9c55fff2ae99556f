"""Which cases of a large matrix are run when: by `pytest`, by `.ci/run`, or by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest


def thinned(
    values: Sequence[Any],
    every: int,
    first: int = 0,
    *,
    left: int = 4,
    always: Collection[Any] = (),
    ids: Callable[[Any], str] = str,
) -> list[Any]:
    """Return parameters of a test: each nth without a mark, of the others some as ``matrix``.

    What is neither is marked as ``full``, and run by hand before a release.

    Args:
        values: The cases.
        every: n. With 0, only those of ``always`` have no mark.
        first: The first one without the mark, below n. Tests that take the same cases begin at
            different ones, so that each case is met by one of them.
        left: Of how many others one is ``matrix``, beginning with another one for each ``first``.
        always: Cases without a mark.
        ids: Names a case.
    """
    taken = {
        i for i, value in enumerate(values) if (every and i % every == first) or value in always
    }
    others = [i for i in range(len(values)) if i not in taken]
    matrix = set(others[first % left :: left])

    def marks(i: int) -> Any:
        if i in taken:
            return ()
        return pytest.mark.matrix if i in matrix else pytest.mark.full

    return [pytest.param(value, id=ids(value), marks=marks(i)) for i, value in enumerate(values)]
