"""Plans a run that tunes: all levers that could help are in it, for the worker to compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fasttrain.model.decision import Setting, Source, SourceKind
from fasttrain.model.errors import FasttrainError
from fasttrain.model.levers import LEVERS
from fasttrain.model.plan import EnvVar, LaunchPlan
from fasttrain.model.settings import Settings
from fasttrain.model.tuning import Tuning

_TRIED = Source(SourceKind.DEFAULT, "fasttrain tune")
# Source: the documentation of wandb 0.23 and neptune 1.14, "Environment variables".
_LOGGERS = ("WANDB_MODE", "NEPTUNE_MODE")
_OFFLINE = "a run that tunes is none of the user's experiments"
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
    make: Callable[[Settings], LaunchPlan], settings: Settings, tuning: Tuning
) -> TuningPlan:
    """Return the plan of a run that tunes.

    Args:
        make: Makes the plan of a run.
        settings: What the user wants; a lever that a person has switched off isn't tried.
        tuning: What the worker is asked for.

    Raises:
        FasttrainError: Of `make`; ``tune-ranks`` for several processes, ``tune-command`` for a
            command without Python, ``tune-preempt`` with snapshots, ``tune-nothing`` where there is
            no lever to try.
    """
    plan = make(settings)
    _check(plan)
    left: dict[str, str] = {}
    for name, row in LEVERS.items():
        setting: Setting[Any] = getattr(settings, name)
        if row.tried is None or setting.source.explicit:
            continue
        tried: dict[str, Any] = {name: Setting(row.tried, _TRIED)}
        wanted = replace(settings, **tried)
        try:
            plan, settings = make(wanted), wanted
        except FasttrainError as error:
            left[name] = error.why
    levers, idle = _compared(plan)
    if not levers:
        raise _nothing(left | idle)
    shutdown_s = min(SHUTDOWN_S, plan.shutdown_timeout_s)
    offline = tuple(EnvVar(name, "offline", _OFFLINE, _TRIED) for name in _LOGGERS)
    others = tuple(one for one in plan.environment if one.name not in _LOGGERS)
    tuned = replace(
        plan, tuning=tuning, shutdown_timeout_s=shutdown_s, environment=(*others, *offline)
    )
    return TuningPlan(tuned, levers, left | idle)


def _compared(plan: LaunchPlan) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the levers that are switched, and why the others aren't."""
    levers: list[str] = []
    left: dict[str, str] = {}
    for name, row in LEVERS.items():
        decision = getattr(plan.levers, name)
        mode = row.mode(decision.value)
        if mode in row.switched:
            levers.append(name)
        elif mode in row.workers and mode != row.off:
            left[name] = f"{mode} can't be switched off within a process: it is on all the time"
        elif not row.several:
            left[name] = decision.reason
    return tuple(levers), left


def _check(plan: LaunchPlan) -> None:
    if plan.target.kind == "command":
        raise FasttrainError(
            "a command can't be tuned",
            why="with --no-python fasttrain starts it as it is, and switches nothing in it",
            fix="name the training script",
            slug="tune-command",
        )
    if plan.processes.value.backend != "direct":
        raise FasttrainError(
            "several processes can't be tuned together",
            why="levers are switched between the steps of one process",
            fix="tune with one process: --gpus 0, or --nproc-per-node 1",
            slug="tune-ranks",
        )
    if plan.preempt.value.mode == "snapshot" or plan.preempt.value.resume != "no":
        raise FasttrainError(
            "a run that tunes keeps no snapshots",
            why="nothing that it writes is kept",
            fix="leave --preempt, --snapshot-every and --resume out",
            slug="tune-preempt",
        )


def _nothing(left: dict[str, str]) -> FasttrainError:
    return FasttrainError(
        "there is nothing to tune",
        why="; ".join(f"{name}: {reason}" for name, reason in left.items()),
        fix="ask for a lever, such as --compile default",
        slug="tune-nothing",
    )
