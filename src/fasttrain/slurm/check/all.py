"""All checks of a job before it is queued."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fasttrain.model.examination import Finding
from fasttrain.slurm.check.cluster import (
    judge_account,
    judge_nodes,
    judge_partition,
    judge_resources,
    judge_time,
    judge_unread,
)
from fasttrain.slurm.check.facts import Seen
from fasttrain.slurm.check.job import (
    foretold,
    judge_binding,
    judge_end,
    judge_environment,
    judge_places,
    judge_python,
    judge_sent,
    judge_setup,
)

CHECKS: tuple[Callable[[Seen], Iterator[Finding]], ...] = (
    judge_partition,
    judge_time,
    judge_nodes,
    judge_resources,
    judge_account,
    judge_end,
    judge_binding,
    judge_python,
    judge_setup,
    judge_places,
    judge_environment,
    judge_unread,
)


@dataclass(frozen=True, slots=True)
class Checked:
    """What the checks found.

    Attributes:
        findings: What would fail, and what may, in the order of the checks.
        start: When and where the job would start, in sbatch's words; empty where it says none.
        sbatch: All that ``sbatch --test-only`` said.
        warnings: What the user should know besides, one sentence each.
    """

    findings: tuple[Finding, ...]
    start: str
    sbatch: str
    warnings: tuple[str, ...] = ()

    @property
    def broken(self) -> bool:
        """Return whether the job would fail, or never start."""
        return any(finding.severity == "error" for finding in self.findings)


def check(seen: Seen) -> Checked:
    """Return what would fail after hours in the queue."""
    findings = [finding for judge in CHECKS for finding in judge(seen)]
    causes = {finding.check for finding in findings if finding.severity == "error"}
    if any(finding.check == "slurm-nodes" for finding in findings):
        # --test-only refuses what needs a drained node; sbatch itself takes it, and it waits.
        # Seen on SLURM 22.05.
        causes.add("slurm-resources")
    # A refusal is told in sbatch's words where no check has told its cause already.
    findings += [finding for finding in judge_sent(seen) if finding.check not in causes]
    said = seen.sent.said.strip()
    return Checked(tuple(findings), foretold(seen.sent), said, seen.job.parameters.warnings)
