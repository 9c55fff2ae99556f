"""Plans which settings of the process a run that tunes compares, and what later runs make of them.

A setting of the process can't change between two steps of one: it is compared by runs beside each
other. Each value is a variable of the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fasttrain.model.decision import Setting, Source, SourceKind
from fasttrain.model.levers import LEVERS
from fasttrain.model.machine import Machine
from fasttrain.model.plan import EnvVar, LaunchPlan
from fasttrain.model.settings import Settings
from fasttrain.model.tuning import Ratio, Tuned, TunedVariable, TuningReport
from fasttrain.planning.describe import EXACT, is_exact
from fasttrain.planning.environment import parse_env
from fasttrain.planning.tuning import tuned_options

THREADS, ALLOCATOR = "threads", "allocator"
THREADS_VARIABLE, ALLOCATOR_VARIABLE = "OMP_NUM_THREADS", "GLIBC_TUNABLES"
# By default glibc returns each large tensor's memory to the kernel, which clears new pages for the
# next one. With this it keeps the memory, and asks for huge pages where the kernel has them.
# Source: glibc 2.36 manual, "Memory Allocation Tunables"; hugetlb is ignored before 2.35
KEEP_MEMORY = ":".join(
    f"glibc.malloc.{name}" for name in ("hugetlb=1", "mmap_max=0", f"trim_threshold={2**40}")
)
# A user who has set one of these has decided by himself; MKL's is stronger in torch's builds.
_OWN = {
    THREADS_VARIABLE: (THREADS_VARIABLE, "MKL_NUM_THREADS"),
    ALLOCATOR_VARIABLE: (ALLOCATOR_VARIABLE, "LD_PRELOAD"),
}
_COUNT = re.compile(r"[1-9][0-9]{0,4}")
_TRIED = Source(SourceKind.TUNED, "tried by fasttrain tune")
_KEPT = Source(SourceKind.TUNED, "kept by fasttrain tune")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A value of a setting that is compared with the present one.

    Attributes:
        setting: Name of the setting, such as ``threads``.
        shown: The value in words.
        variable: The environment's variable that makes it.
        value: Its value.
        against: The present value in words; empty if only a run can tell.
    """

    setting: str
    shown: str
    variable: str
    value: str
    against: str = ""

    @property
    def tried(self) -> EnvVar:
        """The variable of a run that tries it."""
        return EnvVar(
            self.variable, self.value, f"tried by a run that compares {self.setting}", _TRIED
        )


_KEEPING = Candidate(ALLOCATOR, "keeping memory", ALLOCATOR_VARIABLE, KEEP_MEMORY, "glibc's")


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """The settings to compare.

    Attributes:
        candidates: In the order in which they are compared.
        left: Settings that aren't, each with the reason.
    """

    candidates: tuple[Candidate, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)


def plan_process_settings(
    plan: LaunchPlan,
    settings: Settings,
    environ: Mapping[str, str],
    machine: Machine,
    *,
    physical_cores: int,
    glibc: bool,
    apart: bool,
) -> ProcessSettings:
    """Return the settings of the process that a run that tunes compares.

    Args:
        plan: The plan of the run.
        settings: What the user wants.
        environ: The user's environment.
        machine: The machine.
        physical_cores: Those that this process may run on; 0 if unknown.
        glibc: Whether memory is that of glibc.
        apart: Whether what the script writes is thrown away, so that it may be started again.
    """
    own = {**environ, **parse_env(settings.env)}
    left: dict[str, str] = {}
    candidates: list[Candidate] = []
    why = _why_none(plan, settings, apart=apart)
    if found := why or _decided(THREADS_VARIABLE, own) or _one_core(machine):
        left[THREADS] = found
    else:
        counts = _thread_counts(machine.cpu.cores, physical_cores)
        candidates += (Candidate(THREADS, str(n), THREADS_VARIABLE, str(n)) for n in counts)
    if found := why or _decided(ALLOCATOR_VARIABLE, own) or ("" if glibc else "it isn't glibc's"):
        left[ALLOCATOR] = found
    else:
        candidates.append(_KEEPING)
    return ProcessSettings(tuple(candidates), left)


def _why_none(plan: LaunchPlan, settings: Settings, *, apart: bool) -> str:
    """Return why no settings of the process are compared; empty if they are."""
    if plan.device_kind.value != "cpu":
        return f"that is compared where a CPU trains, and this is on {plan.device_kind.value}"
    if plan.processes.value.backend != "direct":
        return "that is compared for one process, and these are several"
    if is_exact(settings):
        return EXACT
    if not apart:
        return "with --keep-writes the script is started once"
    return ""


def _decided(variable: str, own: Mapping[str, str]) -> str:
    named = next((name for name in _OWN[variable] if name in own), "")
    return f"you have set {named}={own[named]}" if named else ""


def _one_core(machine: Machine) -> str:
    return f"there is one core: {machine.cpu.cores_reason}" if machine.cpu.cores == 1 else ""


def _thread_counts(cores: int, physical: int) -> tuple[int, ...]:
    """Return the numbers of threads to compare, the likeliest present one last.

    What a run has without any setting is known only once torch has been imported.
    Source: torch 2.13, aten/src/ATen/ParallelOpenMP.cpp: with MKL it is the physical cores
    """
    most = min(physical, cores) if physical else cores
    counts = (most // 2, 1, cores, most)
    return tuple(reversed(dict.fromkeys(n for n in reversed(counts) if n >= 1)))


def settings_with_kept(settings: Settings, report: TuningReport, plan: LaunchPlan) -> Settings:
    """Return the settings of a run with the levers that were kept.

    Args:
        settings: What the user wants.
        report: The result so far.
        plan: The plan of the run that compared the levers.
    """
    options = dict(tuned_options(report, plan))
    for name, row in LEVERS.items():  # what a run would decide by itself isn't decided meanwhile
        if getattr(settings, name).value in row.undecided and name not in options:
            options[name] = row.off
    kept: dict[str, Any] = {name: Setting(value, _KEPT) for name, value in options.items()}
    return replace(settings, **kept)


def tuned_variables(report: TuningReport, cores: int) -> tuple[TunedVariable, ...]:
    """Return the settings of a result that later runs use."""
    return tuple(
        TunedVariable(name, one.variable.partition("=")[2], f"{one.against} {one.levers[0]}",
                      one.ratio, cores)
        for name, one in report.kept_settings.items()
    )  # fmt: skip


def is_valid(variable: TunedVariable) -> bool:
    """True if a variable that was read back is one that tune sets."""
    if variable.name == ALLOCATOR_VARIABLE:
        return variable.value == KEEP_MEMORY
    count = _COUNT.fullmatch(variable.value)
    few = count is not None and int(count[0]) <= variable.cores
    return few and variable.name == THREADS_VARIABLE


def use_variables(
    tuned: Tuned, settings: Settings, environ: Mapping[str, str], machine: Machine
) -> tuple[tuple[EnvVar, ...], tuple[str, ...]]:
    """Return the variables that a result sets, and why others aren't used, one sentence each.

    Args:
        tuned: The result.
        settings: What the user wants.
        environ: The user's environment.
        machine: The machine.
    """
    own = {**environ, **parse_env(settings.env)}
    used: list[EnvVar] = []
    left: list[str] = []
    for one in tuned.variables:
        other = next((name for name in _OWN[one.name] if name in own and name != one.name), "")
        if one.cores != machine.cpu.cores:
            why = f"{one.cores} cores then, {machine.cpu.cores} now"
        elif is_exact(settings):
            why = EXACT
        elif other:
            why = f"you have set {other}={own[other]}"
        else:
            reason = f"steps took {times(one.ratio)} the time of {one.against}"
            source = Source(SourceKind.TUNED, f"tuned on {tuned.date}")
            used.append(EnvVar(one.name, one.value, reason, source))
            continue
        left.append(f"{one.name}={one.value}, tuned on {tuned.date}, isn't used: {why}")
    return tuple(used), tuple(left)


def times(ratio: Ratio) -> str:
    """Return a ratio with its interval in words."""
    return f"x {ratio.middle:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
