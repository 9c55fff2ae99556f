"""Plans the runs of a proof: with the levers that were chosen, without any, and as controls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fasttrain.model.decision import Decision, Setting, Source, SourceKind
from fasttrain.model.errors import FasttrainError
from fasttrain.model.levers import LEVERS
from fasttrain.model.plan import EnvVar, LaunchPlan
from fasttrain.model.proof import Proof, Side
from fasttrain.model.settings import Settings
from fasttrain.model.tuning import REORDERED
from fasttrain.planning.tuning import SHUTDOWN_S, check_comparable, offline, on_one_node

STEPS = 200  # unless --max-steps says another number
CONTROLS: tuple[Side, ...] = ("control-1", "control-2", "control-3")
SIDES: tuple[Side, ...] = ("plain", "chosen", *CONTROLS)
_HALF = 2.0**-11  # fp16
_PROOF = Source(SourceKind.DEFAULT, "--prove")
_HASHES = "PYTHONHASHSEED"


def plain_settings(settings: Settings) -> Settings:
    """Return the settings of a run without levers."""
    off: dict[str, Any] = {
        name: Setting(row.presets["exact"], _PROOF)
        for name, row in LEVERS.items()
        if "exact" in row.presets
    }
    return replace(settings, **off)


def python_settings(settings: Settings) -> Settings:
    """Return the settings of a run as ``python train.py``: without levers or workers of ours."""
    return replace(plain_settings(settings), loader_workers=Setting(None, _PROOF))


def of_one_attempt(settings: Settings) -> Settings:
    """Return the settings of a run that isn't restarted: what it does would be compared twice."""
    return replace(settings, max_restarts=Setting(0, _PROOF))


def one_process(settings: Settings) -> Settings:
    """Return the settings of a run as ``python train.py``, in the place of several ranks."""
    alone: dict[str, Any] = {"nproc_per_node": 1, "strategy": "auto", "show_ranks": "0"}
    return replace(settings, **{name: Setting(it, _PROOF) for name, it in alone.items()})


def check(plan: LaunchPlan) -> None:
    """Check that a plan can be proved.

    Raises:
        FasttrainError: Those of `check_comparable`, and ``prove-nothing`` without any lever.
    """
    check_comparable(plan, "prove", _apart(plan))
    if not compared(plan):
        reasons = (f"{name}: {getattr(plan.levers, name).reason}" for name in LEVERS)
        raise FasttrainError(
            "there is nothing to prove",
            why=f"all levers are off: {'; '.join(reasons)}",
            fix="ask for a lever, such as --compile default",
            slug="prove-nothing",
        )


def compared(plan: LaunchPlan) -> dict[str, str]:
    """Return what is compared with plain python: the levers that are on, and loader workers."""
    workers = plan.loader_workers
    return plan.levers.on() | ({"loader workers": str(workers.value)} if workers else {})


def _apart(plan: LaunchPlan) -> str:
    """Return why the processes of a plan can't be compared with others; empty if they can."""
    processes, strategy = plan.processes.value, plan.levers.strategy.value
    if processes.backend == "direct":
        return ""
    if not on_one_node(plan):
        return "the runs that are compared take turns on one node"
    if processes.rdzv_endpoint:
        return "two runs that take turns would meet at one --rdzv-endpoint"
    if strategy.mode == "none":
        return "with --strategy none they have nothing to do with each other"
    if strategy.injected and strategy.batch != "split":
        return f"with --batch {strategy.batch} they train on other batches than one process"
    return ""


def rounding(plan: LaunchPlan) -> float:
    """Return what the levers of a plan round results by, relatively."""
    known = [LEVERS[name].switched.get(word, 0.0) for name, word in plan.levers.on().items()]
    half = plan.levers.amp.value.precision == "float16"
    return max(REORDERED, *known, _HALF if half else 0.0)


def plan_side(
    plan: LaunchPlan, proof: Proof, *, off: Mapping[str, Any], environ: Mapping[str, str]
) -> LaunchPlan:
    """Return the plan of one of the runs of a proof.

    Args:
        plan: The plan of a run with its levers, or without.
        proof: What its worker is asked for.
        off: The value of each lever that changes nothing.
        environ: The user's environment.
    """
    with_levers = proof.side == "chosen"
    return plan_turns(plan if with_levers else without_levers(plan, off), proof, environ)


def without_levers(plan: LaunchPlan, off: Mapping[str, Any]) -> LaunchPlan:
    """Return the plan with levers that change nothing.

    What a lever leaves to the script stays so, such as ranks of its own.

    Args:
        plan: The plan.
        off: The value that changes nothing, of each lever that is to be off.
    """
    none = "plain python has no levers"
    levers: dict[str, Any] = {
        name: Decision(value, none, _PROOF)
        for name, value in off.items()
        if LEVERS[name].mode(getattr(plan.levers, name).value) not in LEVERS[name].ceded
    }
    return replace(plan, levers=replace(plan.levers, **levers))


def plan_turns(plan: LaunchPlan, proof: Proof, environ: Mapping[str, str]) -> LaunchPlan:
    """Return the plan of a run that takes turns with others, of which nothing is kept.

    Args:
        plan: The plan of a run.
        proof: What its worker is asked for.
        environ: The user's environment.
    """
    guard = plan.guards.hang
    stops = replace(guard, value=replace(guard.value, action="stop"))
    environment = offline(plan.environment)
    return replace(
        plan,
        proof=proof,
        guards=replace(plan.guards, hang=stops),
        environment=environment if _HASHES in environ else _with_hashes(environment),
        restarts=replace(plan.restarts, value=replace(plan.restarts.value, most=0)),
        max_steps=None,
        shutdown_timeout_s=min(SHUTDOWN_S, plan.shutdown_timeout_s),
    )


def _with_hashes(environment: tuple[EnvVar, ...]) -> tuple[EnvVar, ...]:
    """Have sets of strings be in the same order in all runs, unless --env says otherwise."""
    if any(variable.name == _HASHES for variable in environment):
        return environment
    reason = "sets of strings are in the same order in all runs that are compared"
    return (*environment, EnvVar(_HASHES, "0", reason, _PROOF))
