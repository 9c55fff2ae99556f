"""What a check is."""

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
        judge: Gives what it finds; nothing where all is well or unknown.
        mend: Does what the finding's fix says, where that is safe and stays on this machine, and
            gives what was done, in one line; None where it is the user's to do.
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
