"""A check of `fasttrain doctor`, and the decorator that declares one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fasttrain.model.examination import Examination, Finding, Severity

Mend = Callable[[Examination], str]
Judge = Callable[[Examination], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Check:
    """One question about a machine.

    Attributes:
        slug: Its stable name, for ``--only`` and ``--skip``.
        about: What it looks at, in one line, for ``--list``.
        judge: Yields findings; none if all is well or the answer is unknown.
        mend: Applies the finding's fix and returns what was done, in one line; None if the fix is
            not safe to apply for the user.
    """

    slug: str
    about: str
    judge: Judge
    mend: Mend | None = None

    def finding(
        self, severity: Severity, what: str, *, why: str, fix: str, where: str = ""
    ) -> Finding:
        """Return a finding of this check."""
        return Finding(self.slug, severity, what, why, fix, where, self.mend is not None)


def check(slug: str, about: str, mend: Mend | None = None) -> Callable[[Judge], Check]:
    """Return a decorator that turns a judge into a `Check`.

    The function's name then stands for the check, so the judge can make findings by it.
    """

    def declare(judge: Judge) -> Check:
        return Check(slug, about, judge, mend)

    return declare
