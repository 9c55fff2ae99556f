"""Which cases of a large matrix an ordinary run of the tests takes: the others are marked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest


def thinned(
    values: Sequence[Any],
    every: int,
    first: int = 0,
    *,
    always: Collection[Any] = (),
    ids: Callable[[Any], str] = str,
) -> list[Any]:
    """Return parameters of a test of which all but each nth are marked as ``matrix``.

    Args:
        values: The cases.
        every: n.
        first: The first one without the mark, below n. Tests that take the same cases begin at
            different ones, so that each case is met by one of them.
        always: Cases without it.
        ids: Names a case.
    """
    taken = {i for i, value in enumerate(values) if i % every == first or value in always}
    return [
        pytest.param(value, id=ids(value), marks=() if i in taken else pytest.mark.matrix)
        for i, value in enumerate(values)
    ]
