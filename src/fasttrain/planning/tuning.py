"""Plans a run that tunes: all levers that could help are in it, for the worker to compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import PurePath
from typing import Any, Literal

from fasttrain.model.decision import Setting, Source, SourceKind
from fasttrain.model.errors import FasttrainError, printable
from fasttrain.model.levers import LEVERS
from fasttrain.model.machine import Machine
from fasttrain.model.plan import EnvVar, LaunchPlan
from fasttrain.model.settings import Settings
from fasttrain.model.tuning import Tuned, TunedFor, TunedResults, Tuning, TuningReport

_TRIED = Source(SourceKind.TUNED, "tried by fasttrain tune")
# Source: the documentation of wandb 0.23 and neptune 1.14, "Environment variables".
_LOGGERS = ("WANDB_MODE", "NEPTUNE_MODE")
_OFFLINE = "a run that tunes or proves is none of the user's experiments"
# Words of `Levers` that the option has another word for.
_OPTION_WORDS = {"bfloat16": "bf16", "float16": "fp16"}
# A worker that is told to end has nothing of its own to save.
SHUTDOWN_S = 5


@dataclass(frozen=True, slots=True)
class TuningPlan:
    """The plan of a run that tunes.

    Attributes:
        plan: The plan.
        levers: The levers that it compares.
        left: Levers that it doesn't, each with the reason.
    """

    plan: LaunchPlan
    levers: tuple[str, ...]
    left: dict[str, str]


def plan_tuning(
    make: Callable[[Settings], LaunchPlan],
    settings: Settings,
    tuning: Tuning,
    *,
    needs_levers: bool = True,
) -> TuningPlan:
    """Return the plan of a run that tunes.

    Args:
        make: Makes the plan of a run.
        settings: What the user wants; a lever that a person has switched off isn't tried.
        tuning: What the worker is asked for.
        needs_levers: Whether there is nothing else to compare.

    Raises:
        FasttrainError: Of `make`; ``tune-ranks`` for processes that aren't in lockstep on one node,
            ``tune-command`` for a command without Python, ``tune-preempt`` with snapshots,
            ``tune-nothing`` where there is no lever to try.
    """
    plan = make(settings)
    check_comparable(plan, "tune", _apart(plan))
    left: dict[str, str] = {}
    for name, row in LEVERS.items():
        setting: Setting[Any] = getattr(settings, name)
        if row.tried is None or (setting.source.explicit and setting.value not in row.undecided):
            continue
        tried: dict[str, Any] = {name: Setting(row.tried, _TRIED)}
        wanted = replace(settings, **tried)
        try:
            plan, settings = make(wanted), wanted
        except FasttrainError as error:
            left[name] = error.why
    levers, idle = _compared(plan)
    if not levers and needs_levers:
        raise _nothing(left | idle)
    shutdown_s = min(SHUTDOWN_S, plan.shutdown_timeout_s)
    environment = offline(plan.environment)
    tuned = replace(plan, tuning=tuning, shutdown_timeout_s=shutdown_s, environment=environment)
    return TuningPlan(tuned, levers, left | idle)


def offline(environment: tuple[EnvVar, ...]) -> tuple[EnvVar, ...]:
    """Return an environment in which no experiment is logged."""
    added = tuple(EnvVar(name, "offline", _OFFLINE, _TRIED) for name in _LOGGERS)
    return (*(one for one in environment if one.name not in _LOGGERS), *added)


def _compared(plan: LaunchPlan) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the levers that are switched, and why the others aren't."""
    levers: list[str] = []
    left: dict[str, str] = {}
    for name, row in LEVERS.items():
        decision = getattr(plan.levers, name)
        mode = row.mode(decision.value)
        if mode in row.switched:
            levers.append(name)
        elif mode in row.workers and mode != row.off and not row.several:
            left[name] = f"{mode} can't be switched off within a process: it is on all the time"
        elif not row.several:
            left[name] = decision.reason
    return tuple(levers), left


def check_comparable(plan: LaunchPlan, name: Literal["tune", "prove"], apart: str) -> None:
    """Check that levers can be compared in the processes of a plan.

    Args:
        plan: The plan.
        name: What compares them.
        apart: Why its processes can't be compared together; empty if they can.

    Raises:
        FasttrainError: ``...-command`` for a command without Python, ``...-ranks`` for processes
            that are apart, and ``...-preempt`` with snapshots; ``...`` is the name.
    """
    compared = {"tune": "tuned", "prove": "proved"}[name]
    if plan.target.kind == "command":
        raise FasttrainError(
            f"a command can't be {compared}",
            why="with --no-python fasttrain starts it as it is, and sees nothing of what it does",
            fix="name the training script",
            slug=f"{name}-command",
        )
    if apart:
        raise FasttrainError(
            f"these processes can't be {compared} together",
            why=apart,
            fix=f"{name} with one process: --gpus 0, or --nproc-per-node 1",
            slug=f"{name}-ranks",
        )
    if plan.preempt.value.mode == "snapshot" or plan.preempt.value.resume != "no":
        raise FasttrainError(
            f"a run that {name}s keeps no snapshots",
            why="it ends after some steps, and nothing that it writes is kept",
            fix="leave --preempt, --snapshot-every and --resume out",
            slug=f"{name}-preempt",
        )


def _apart(plan: LaunchPlan) -> str:
    """Return why levers can't be switched at the same step of all processes; empty if they can."""
    if plan.processes.value.backend == "direct":
        return ""
    if not on_one_node(plan):
        return "levers are switched in the processes of one node"
    strategy = plan.levers.strategy.value.mode
    if strategy == "none":
        return "with --strategy none nothing keeps their steps together"
    if strategy == "fsdp":
        return "a call of a model that is sharded can't be repeated by one rank, to compare results"
    return ""


def on_one_node(plan: LaunchPlan) -> bool:
    """True if one node has all processes of a run, and fasttrain starts them."""
    processes = plan.processes.value
    return processes.backend != "slurm" and processes.max_nodes == 1


# What later runs make of a result.


def tuned_options(report: TuningReport, plan: LaunchPlan) -> dict[str, str]:
    """Return the option and value of each lever of which a result says whether it is used.

    What is undecided, or has no effect, isn't named, so that the defaults hold.
    """
    options: dict[str, str] = {}
    for one in report.compared:
        if one.verdict not in ("undecided", "no effect"):
            name = one.levers[0]
            word = LEVERS[name].mode(getattr(plan.levers, name).value)
            off = LEVERS[name].presets["exact"]
            options[name] = option_word(word) if one.kept else off
    return options


def option_word(word: str) -> str:
    """Return what an option calls a word of `Levers`."""
    return _OPTION_WORDS.get(word, word)


def tuned_for(masked: LaunchPlan, machine: Machine, source: str) -> TunedFor:
    """Return what a result of a run holds for.

    Args:
        masked: The plan of the run, secrets masked.
        machine: The machine.
        source: Digest of the script's own file; empty for a module.
    """
    target = masked.target
    script = target.name if target.kind == "module" else f"{PurePath(masked.cwd, target.name)}"
    names = tuple(device.name for device in machine.devices) or (machine.cpu.model,)
    devices = (masked.device_kind.value, *names)
    versions = (machine.torch.version, masked.fasttrain_version)
    strategy = LEVERS["strategy"].words(masked.levers.strategy.value)
    count = masked.processes.value.world_size
    return TunedFor(script, target.args, source, devices, *versions, count, strategy)


def find_tuned(results: TunedResults, wanted: TunedFor) -> tuple[Tuned | None, str]:
    """Return the latest result that holds, or why the latest one of this script doesn't."""
    same = [one for one in results.results if one.of.script == wanted.script]
    for one in reversed(same):
        if one.of == wanted:
            return one, ""
    if not same:
        return None, ""
    changed = [
        _changed(field.name, getattr(same[-1].of, field.name), getattr(wanted, field.name))
        for field in fields(TunedFor)
        if getattr(same[-1].of, field.name) != getattr(wanted, field.name)
    ]
    return None, f"what was tuned on {same[-1].date} isn't used: {'; '.join(changed)}"


def _changed(name: str, then: object, now: object) -> str:
    if name == "source":  # digests say nothing to a person
        return "the script's file has changed since"
    return f"{name} {_shown(then)} then, {_shown(now)} now"


def use_tuned(
    make: Callable[[Settings], LaunchPlan],
    settings: Settings,
    tuned: Tuned,
    plain: LaunchPlan,
    more: Mapping[str, str],
) -> LaunchPlan:
    """Return the plan of a run with a result of tuning in the place of defaults.

    Args:
        make: Makes the plan of a run, with what the result decides besides levers.
        settings: What the user wants; options that a person has set stay.
        tuned: The result.
        plain: The plan without the result.
        more: How that is told, such as ``OMP_NUM_THREADS=1``, each with why.
    """
    source = Source(SourceKind.TUNED, f"tuned on {tuned.date}")
    chosen: dict[str, Any] = {
        name: Setting(value, source)
        for name, value in tuned.options.items()
        if name in LEVERS and _is_free(name, getattr(settings, name))
    }
    try:
        plan = make(replace(settings, **chosen))
    except FasttrainError as error:
        why = f"what was tuned on {tuned.date} can't be used: {error.why}."
        return replace(plain, warnings=(*plain.warnings, why))
    words = [f"--{name} {setting.value}" for name, setting in chosen.items()]
    used = " ".join([*words, *more])
    if not used:
        return plan
    ratio = tuned.ratio if chosen.keys() == tuned.options.keys() else None  # it is of all together
    gain = (
        f": steps took x {ratio.middle:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else ""
    )
    gain += "".join(f"; with {word} {reason}" for word, reason in more.items())
    return replace(plan, hints=(*plan.hints, f"tuned on {tuned.date}, {used}{gain}."))


def _is_free(name: str, setting: Setting[Any]) -> bool:
    """True if nobody has set an option, or to a value that leaves the choice to the run."""
    return not setting.source.explicit or setting.value in LEVERS[name].undecided


def _shown(value: object) -> str:
    return printable(" ".join(value) or "none" if isinstance(value, tuple) else str(value))


def _nothing(left: dict[str, str]) -> FasttrainError:
    return FasttrainError(
        "there is nothing to tune",
        why="; ".join(f"{name}: {reason}" for name, reason in left.items()),
        fix="ask for a lever, such as --compile default",
        slug="tune-nothing",
    )
