"""All that ``doctor`` has to say, in one value."""

from __future__ import annotations

from dataclasses import dataclass

from fasttrain.doctor.bench import Measurement, Verdict
from fasttrain.doctor.checks.words import alike, present, visible
from fasttrain.doctor.script import LeverLine
from fasttrain.model.examination import Examination, Finding
from fasttrain.model.machine import Device
from fasttrain.model.vendors import VENDORS
from fasttrain.planning.describe import counted


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was seen, what is to be said of it, and what to type next.

    Attributes:
        examination: What was seen of the machine.
        findings: What is wrong or could be better, the worst first.
        command: The command that fits this machine best.
        why: Why that one.
        script: The script as the user names it; empty without one.
        python: Path of the Python that runs scripts; empty where it is fasttrain's own.
        levers: What each lever would do with it in a run without flags.
        measurements: What ``--bench`` measured, and `verdicts` what that says.
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
        """Return whether a run here would fail or be wrong."""
        return any(finding.severity == "error" for finding in self.findings)


def best_command(seen: Examination, script: str) -> tuple[str, str]:
    """Return the command line that fits a machine best, and why.

    What fasttrain chooses by itself, precision and fused optimizers, is left out of it.

    Args:
        seen: The machine.
        script: The script as the user names it; empty without one.
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
        why += ": of one model, because the slowest would hold up the others"
    elif len(chosen) > 1:
        words.append("--gpus all")
    compiles = seen.torch is not None and seen.torch.compiled.state == "ok"
    if compiles and VENDORS[devices[0].kind].cuda_graphs:
        words.append("--compile default")
        why += "; torch.compile works here"
    return " ".join(words), why


def usable(seen: Examination) -> list[Device]:
    """Return devices of the first kind that the script's torch can drive, as far as is known."""
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
