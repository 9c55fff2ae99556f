"""All checks, and the diagnosis that they make together."""

from __future__ import annotations

from collections.abc import Iterable

from fasttrain.config.values import suggest
from fasttrain.doctor.check import Check
from fasttrain.doctor.checks import (
    cluster,
    device_state,
    device_use,
    disks,
    environment,
    host,
    network,
    topology,
    torch_install,
    trials,
    visibility,
)
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.examination import Examination, Finding, Severity

CHECKS: tuple[Check, ...] = (
    *torch_install.CHECKS,
    *trials.CHECKS,
    *device_state.CHECKS,
    *device_use.CHECKS,
    *topology.CHECKS,
    *visibility.CHECKS,
    *environment.CHECKS,
    *host.CHECKS,
    *disks.CHECKS,
    *network.CHECKS,
    *cluster.CHECKS,
)

_RANKING: tuple[Severity, ...] = ("error", "warning", "hint")


def diagnose(
    seen: Examination, *, only: Iterable[str] = (), skip: Iterable[str] = ()
) -> tuple[Finding, ...]:
    """Return what the checks find, the worst first, and within a severity in their order.

    Args:
        seen: The machine, its state and surroundings.
        only: Slugs of the checks to make; all when empty.
        skip: Slugs of the checks to leave out.

    Raises:
        FasttrainError: ``doctor-check``: a slug is not that of a check.
    """
    chosen, left_out = _known(only), _known(skip)
    checks = [c for c in CHECKS if c.slug not in left_out and (not chosen or c.slug in chosen)]
    return worst_first(finding for check in checks for finding in check.judge(seen))


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings by their severity, and within one as they come."""
    return tuple(sorted(findings, key=lambda finding: _RANKING.index(finding.severity)))


def _known(slugs: Iterable[str]) -> frozenset[str]:
    wanted = frozenset(slugs)
    known = [check.slug for check in CHECKS]
    for slug in sorted(wanted - set(known)):
        raise FasttrainError(
            f"there is no check {slug!r}",
            why=f"doctor has {len(known)} checks, and none of that name",
            fix=suggest(slug, known, "fasttrain doctor --list shows them"),
            slug="doctor-check",
            exit_code=ExitCode.USAGE,
        )
    return wanted
