"""The whole result of ``doctor``, and the command that it recommends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fasttrain.config.options import suggest
from fasttrain.doctor.bench import Measurement, Verdict
from fasttrain.doctor.check import Check, alike, present, visible
from fasttrain.doctor.checks import devices, environment, host, topology, torch_install
from fasttrain.doctor.script_levers import LeverLine
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.machine import Device, Examination, Finding, Severity
from fasttrain.model.vendors import VENDORS
from fasttrain.planning.describe import counted

# The table of all checks, and the findings that they make together.


CHECKS: tuple[Check, ...] = (
    *torch_install.CHECKS,
    *devices.CHECKS,
    *topology.CHECKS,
    *environment.CHECKS,
    *host.CHECKS,
)

_RANKING: tuple[Severity, ...] = ("error", "warning", "hint")


def diagnose(
    seen: Examination, *, only: Iterable[str] = (), skip: Iterable[str] = ()
) -> tuple[Finding, ...]:
    """Return the findings, the worst first; within a severity, in the order of the checks.

    Args:
        seen: The machine and its state.
        only: Slugs of the checks to make; all if empty.
        skip: Slugs of the checks to leave out.

    Raises:
        FasttrainError: ``doctor-check`` if there is no check with such a slug.
    """
    chosen, left_out = _known(only), _known(skip)
    checks = [c for c in CHECKS if c.slug not in left_out and (not chosen or c.slug in chosen)]
    return worst_first(finding for check in checks for finding in check.judge(seen))


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings sorted by severity; the order within a severity stays."""
    return tuple(sorted(findings, key=lambda finding: _RANKING.index(finding.severity)))


def _known(slugs: Iterable[str]) -> frozenset[str]:
    wanted = frozenset(slugs)
    known = [check.slug for check in CHECKS]
    for slug in sorted(wanted - set(known)):
        raise FasttrainError(
            f"there is no check {slug!r}",
            why=f"doctor has {len(known)} checks, and none with that name",
            fix=suggest(slug, known, "fasttrain doctor --list shows them"),
            slug="doctor-check",
            exit_code=ExitCode.USAGE,
        )
    return wanted


# The whole result of ``doctor``, and the command that it recommends.


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was examined, what was found, and which command to use.

    Attributes:
        examination: The machine and its state.
        findings: What is wrong or could be better, the worst first.
        command: The command that fits this machine best.
        why: The reason for it.
        script: The script as the user names it; empty without one.
        python: Path of the Python that runs scripts; empty if it is fasttrain's own.
        levers: The predicted outcome of each lever in a run without flags.
        measurements: What ``--bench`` measured.
        verdicts: What the measurements mean, in sentences.
    """

    examination: Examination
    findings: tuple[Finding, ...]
    command: str
    why: str
    script: str = ""
    python: str = ""
    levers: tuple[LeverLine, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    verdicts: tuple[Verdict, ...] = ()

    @property
    def broken(self) -> bool:
        """True if a run here would fail or compute wrong results."""
        return any(finding.severity == "error" for finding in self.findings)


def best_command(seen: Examination, script: str) -> tuple[str, str]:
    """Return the command line that fits a machine best, and why.

    It leaves out what fasttrain chooses by default: precision and fused optimizers.

    Args:
        seen: The machine.
        script: The script's path as the user wrote it; empty without one.
    """
    words = ["fasttrain run", script or "train.py"]
    devices = usable(seen)
    if not devices:
        cores = counted(seen.machine.cpu.cores, "CPU core")
        return " ".join(words), f"no accelerator can be used; {cores}"
    chosen = alike(devices)
    name = devices[chosen[0]].name
    why = f"{len(chosen)} x {name}" if len(chosen) > 1 else name
    if len(chosen) < len(devices):
        words.append(f"--gpus {','.join(map(str, chosen))}")
        why += ": of one model, because all would wait for the slowest"
    elif len(chosen) > 1:
        words.append("--gpus all")
    compiles = seen.torch is not None and seen.torch.compiled.state == "ok"
    if compiles and VENDORS[devices[0].kind].cuda_graphs:
        words.append("--compile default")
        why += "; torch.compile works here"
    return " ".join(words), why


def usable(seen: Examination) -> list[Device]:
    """Return the visible devices of the first kind; none if torch is known not to support it."""
    kinds = present(seen)
    if not kinds:
        return []
    kind = kinds[0]
    if seen.torch is not None and seen.torch.imported.state == "ok":
        if VENDORS[kind].torch_type not in seen.torch.available:
            return []
    elif (build := VENDORS[kind].torch_build) and seen.machine.torch.build != build:
        return []
    return [slot.device for slot in visible(seen, kind)]
