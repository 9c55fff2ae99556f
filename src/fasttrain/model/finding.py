"""What is wrong with a machine, a script or a job, as ``doctor`` and ``slurm --check`` tell it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "hint"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a machine or a script that its user should know.

    Attributes:
        check: Slug of the check that found it.
        severity: ``error``: a run will fail or be wrong; ``warning``: it will be slow, or may fail;
            ``hint``: it could be better.
        what: The fact, in one line.
        why: What it does to a run.
        fix: The next thing to type or change.
        where: ``file:line`` in the user's code; empty for a machine.
        mendable: Whether ``--fix`` can do it here.
    """

    check: str
    severity: Severity
    what: str
    why: str
    fix: str
    where: str = ""
    mendable: bool = False
