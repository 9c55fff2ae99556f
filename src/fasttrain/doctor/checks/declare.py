"""How a check is written down: a function that yields findings, under its slug."""

from __future__ import annotations

from collections.abc import Callable

from fasttrain.doctor.check import Check, Judge, Mend


def check(slug: str, about: str, mend: Mend | None = None) -> Callable[[Judge], Check]:
    """Give a decorator that makes a check of its judge, which then knows itself by its name."""

    def declare(judge: Judge) -> Check:
        return Check(slug, about, judge, mend)

    return declare
