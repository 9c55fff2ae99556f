"""Plans which settings of the process a run that tunes compares, and what later runs make of them.

A setting of the process can't change between two steps of one: it is compared by runs beside each
other. Each value is a variable of the environment, or an option of the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fasttrain.model.decision import Setting, Source, SourceKind
from fasttrain.model.errors import FasttrainError
from fasttrain.model.levers import LEVERS
from fasttrain.model.machine import Machine
from fasttrain.model.plan import EnvVar, Invocation, LaunchPlan
from fasttrain.model.settings import Settings
from fasttrain.model.tuning import Compared, Ratio, Tuned, TunedVariable, TuningReport
from fasttrain.planning.describe import EXACT, is_exact
from fasttrain.planning.environment import parse_env
from fasttrain.planning.plan import make_plan
from fasttrain.planning.tuning import tuned_options, use_tuned

THREADS, ALLOCATOR, WORKERS, RANKS = "threads", "allocator", "loader workers", "ranks"
THREADS_VARIABLE, ALLOCATOR_VARIABLE = "OMP_NUM_THREADS", "GLIBC_TUNABLES"
WORKERS_OPTION, RANKS_OPTION = "--loader-workers", "--nproc-per-node"
WORKER_COUNTS, RANK_COUNTS = (1, 4), (2, 4, 8)
LEAST_READING = 0.05  # of a step's time, in a DataLoader without workers
LEAST_STEP_S = 0.005  # of a step that ranks share: they meet twice in it, which takes 1 ms
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
# So has one who has set one of these options.
_OWN_OPTIONS = {
    WORKERS_OPTION: ("loader_workers", "batch"),
    RANKS_OPTION: ("nproc_per_node", "gpus", "nodes", "strategy", "batch"),
}
_COUNT = re.compile(r"[1-9][0-9]{0,4}")
_TRIED = Source(SourceKind.TUNED, "tried by fasttrain tune")
_KEPT = Source(SourceKind.TUNED, "kept by fasttrain tune")


@dataclass(frozen=True, slots=True)
class Value:
    """The value that a run has of a setting.

    Attributes:
        name: The variable of the environment, or the option, that makes it.
        value: Its value.
        reason: Why the run has it.
        source: Who has decided so.
    """

    name: str
    value: str
    reason: str
    source: Source


def with_values(settings: Settings, values: Iterable[Value]) -> tuple[Settings, tuple[EnvVar, ...]]:
    """Return the settings of a run with the options among values, and the variables."""
    options: dict[str, Any] = {}
    variables: list[EnvVar] = []
    for one in values:
        if one.name.startswith("--"):
            option = one.name[2:].replace("-", "_")
            options[option] = Setting(int(one.value), one.source)
        else:
            variables.append(EnvVar(one.name, one.value, one.reason, one.source))
    return replace(settings, **options), tuple(variables)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A value of a setting that is compared with the present one.

    Attributes:
        setting: Name of the setting, such as ``threads``.
        shown: The value in words.
        name: The variable of the environment, or the option, that makes it.
        value: Its value.
        against: The present value in words; empty if only a run can tell.
    """

    setting: str
    shown: str
    name: str
    value: str
    against: str = ""

    @property
    def tried(self) -> Value:
        """The value of a run that tries it."""
        reason = f"tried by a run that compares {self.setting}"
        return Value(self.name, self.value, reason, _TRIED)


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
    make: Callable[[Settings], LaunchPlan],
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
        make: Makes the plan of a run.
        settings: What the user wants.
        environ: The user's environment.
        machine: The machine.
        physical_cores: Those that this process may run on; 0 if unknown.
        glibc: Whether memory is that of glibc.
        apart: Whether what the script writes is thrown away, so that it may be started again.
    """
    own = {**environ, **parse_env(settings.env)}
    cores = machine.cpu.cores
    most = min(physical_cores, cores) if physical_cores else cores
    why = _why_none(make(settings), settings, apart=apart)
    left: dict[str, str] = {}
    candidates: list[Candidate] = []

    def consider(setting: str, why_not: str, *found: Candidate) -> None:
        if why or why_not:
            left[setting] = why or why_not
        else:
            candidates.extend(found)

    one = _one_core(machine)
    # Workers come first: they are compared only where reading is known to take a part of a step.
    counts = tuple(n for n in WORKER_COUNTS if n < cores)
    workers = [Candidate(WORKERS, str(n), WORKERS_OPTION, str(n), "no workers") for n in counts]
    consider(WORKERS, _decided_by_option(WORKERS_OPTION, settings) or one, *workers)
    counts = _thread_counts(cores, most)
    threads = [Candidate(THREADS, str(n), THREADS_VARIABLE, str(n)) for n in counts]
    consider(THREADS, _decided(THREADS_VARIABLE, own) or one, *threads)
    not_glibc = "" if glibc else "it isn't glibc's"
    consider(ALLOCATOR, _decided(ALLOCATOR_VARIABLE, own) or not_glibc, _KEEPING)
    counts = tuple(n for n in RANK_COUNTS if n <= most)
    ranks = [Candidate(RANKS, str(n), RANKS_OPTION, str(n), "one process") for n in counts]
    why_one = "" if why else _why_one_process(make, settings, machine, ranks)
    consider(RANKS, _decided_by_option(RANKS_OPTION, settings) or one or why_one, *ranks)
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


def _why_one_process(
    make: Callable[[Settings], LaunchPlan],
    settings: Settings,
    machine: Machine,
    ranks: Sequence[Candidate],
) -> str:
    """Return why ranks wouldn't train what one process does, or as fast; empty if they might."""
    if not ranks:
        return "there is one physical core"
    if machine.system != "Linux":
        return "several ranks fetch their turns as Linux alone allows"
    try:
        _check_ranks(make(with_values(settings, [ranks[0].tried])[0]))
    except FasttrainError as error:
        return error.why
    return ""


def _check_ranks(plan: LaunchPlan) -> None:
    strategy = plan.levers.strategy
    if strategy.value.mode != "ddp":
        raise FasttrainError(
            "these ranks can't take the place of one process",
            why=strategy.reason,
            fix="leave the number of processes as it is",
            slug="tune-ranks",
        )


def _decided_by_option(option: str, settings: Settings) -> str:
    """Return that a user has decided about an option; empty if not."""
    names = _OWN_OPTIONS[option]
    set_by = (getattr(settings, name) for name in names)
    return next((f"you have set {it.source}" for it in set_by if it.source.explicit), "")


def without_use(
    candidates: Iterable[Candidate], report: TuningReport
) -> tuple[tuple[Candidate, ...], dict[str, str]]:
    """Return the candidates that may help by what is known of a step, and why others can't.

    Args:
        candidates: All that may be compared.
        report: What comparing levers has shown of a step.
    """
    left: dict[str, str] = {}
    step_s = report.noise.plain_step_s if report.noise is not None else 0.0
    if step_s and report.reading_s < LEAST_READING * step_s:
        part = f"{report.reading_s / step_s:.1%} of a step"
        left[WORKERS] = f"DataLoaders without workers take {part}"
    if 0 < step_s < LEAST_STEP_S:
        left[RANKS] = f"a step of {1e3 * step_s:.2g} ms is too short for ranks to share it"
    return tuple(one for one in candidates if one.setting not in left), left


def _decided(variable: str, own: Mapping[str, str]) -> str:
    named = next((name for name in _OWN[variable] if name in own), "")
    return f"you have set {named}={own[named]}" if named else ""


def _one_core(machine: Machine) -> str:
    return f"there is one core: {machine.cpu.cores_reason}" if machine.cpu.cores == 1 else ""


def _thread_counts(cores: int, most: int) -> tuple[int, ...]:
    """Return the numbers of threads to compare, the likeliest present one last.

    What a run has without any setting is known only once torch has been imported.
    Source: torch 2.13, aten/src/ATen/ParallelOpenMP.cpp: with MKL it is the physical cores

    Args:
        cores: Logical ones that are granted.
        most: Physical ones among them.
    """
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
        TunedVariable(name, one.variable.partition("=")[2], _against(name, one), one.ratio, cores)
        for name, one in report.kept_settings.items()
    )


def _against(name: str, one: Compared) -> str:
    return one.against if name in _OWN_OPTIONS else f"{one.against} {one.levers[0]}"


def is_valid(variable: TunedVariable) -> bool:
    """True if a variable that was read back is one that tune sets."""
    if variable.name == ALLOCATOR_VARIABLE:
        return variable.value == KEEP_MEMORY
    count = _COUNT.fullmatch(variable.value)
    few = count is not None and int(count[0]) <= variable.cores
    return few and variable.name in (THREADS_VARIABLE, *_OWN_OPTIONS)


def use_variables(
    tuned: Tuned, settings: Settings, environ: Mapping[str, str], machine: Machine
) -> tuple[tuple[Value, ...], tuple[str, ...]]:
    """Return the values of settings that a result decides, and why others aren't used.

    Args:
        tuned: The result.
        settings: What the user wants.
        environ: The user's environment.
        machine: The machine.
    """
    own = {**environ, **parse_env(settings.env)}
    used: list[Value] = []
    left: list[str] = []
    for one in tuned.variables:
        others = [name for name in _OWN.get(one.name, ()) if name in own]
        if one.cores != machine.cpu.cores:
            why = f"{one.cores} cores then, {machine.cpu.cores} now"
        elif is_exact(settings):
            why = EXACT
        elif others:
            why = f"you have set {others[0]}={own[others[0]]}"
        elif one.name in _OWN_OPTIONS and (found := _decided_by_option(one.name, settings)):
            why = found
        else:
            reason = f"steps took {times(one.ratio)} the time of {one.against}"
            source = Source(SourceKind.TUNED, f"tuned on {tuned.date}")
            used.append(Value(one.name, one.value, reason, source))
            continue
        left.append(f"{one.name}={one.value}, tuned on {tuned.date}, isn't used: {why}")
    return tuple(used), tuple(left)


def use_result(
    tuned: Tuned,
    settings: Settings,
    machine: Machine,
    invocation: Invocation,
    plain: LaunchPlan,
) -> tuple[LaunchPlan, tuple[str, ...]]:
    """Return the plan of a run with a result of tuning, and what of it isn't used, and why.

    Args:
        tuned: The result.
        settings: What the user wants.
        machine: The machine.
        invocation: The call of fasttrain.
        plain: The plan without the result.
    """
    values, unused = use_variables(tuned, settings, invocation.environ, machine)

    def make(settings: Settings) -> LaunchPlan:
        settings, variables = with_values(settings, values)
        plan = make_plan(settings, machine, replace(invocation, tuned=variables))
        if RANKS_OPTION in {one.name for one in values}:
            _check_ranks(plan)
        return plan

    words = {f"{one.name}={one.value}": one.reason for one in values}
    return use_tuned(make, settings, tuned, plain, words), unused


def times(ratio: Ratio) -> str:
    """Return a ratio with its interval in words."""
    return f"x {ratio.middle:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
