"""Tells a plan row by row: what was decided, why, and by whom."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from fasttrain.model.decision import Decision
from fasttrain.model.guards import HangWatch, Preempt, Restarts
from fasttrain.model.levers import LEVERS
from fasttrain.model.plan import EnvVar, LaunchPlan, Processes
from fasttrain.planning.secrets import mask_plan


@dataclass(frozen=True, slots=True)
class Row:
    """One decision in words.

    Attributes:
        topic: What was decided, such as ``amp`` or the name of a variable.
        value: The outcome.
        reason: Why.
        source: The place to go to change it.
    """

    topic: str
    value: str
    reason: str
    source: str


def decisions(plan: LaunchPlan) -> tuple[Row, ...]:
    """Return one row per decision, then one per variable; secrets are masked."""
    return (*lever_rows(plan), *(_variable(variable) for variable in mask_plan(plan).environment))


def lever_rows(plan: LaunchPlan) -> tuple[Row, ...]:
    """Return one row per decision, without the environment."""
    return (
        _row("device", plan.device_kind, plan.device_kind.value),
        _row("devices", plan.devices, ",".join(plan.devices.value) or "none"),
        _row("processes", plan.processes, _processes(plan.processes.value)),
        *(_lever(field.name, plan) for field in fields(plan.levers)),
        _row("preempt", plan.preempt, _preempt(plan.preempt.value)),
        _row("hang", plan.guards.hang, _hang(plan.guards.hang.value)),
        _row("nan", plan.guards.nan, plan.guards.nan.value),
        _row("restarts", plan.restarts, _restarts(plan.restarts.value)),
        *([_row("python", plan.python, plan.python.value)] if plan.python else []),
    )


def _lever(name: str, plan: LaunchPlan) -> Row:
    decision: Decision[Any] = getattr(plan.levers, name)
    return _row(name, decision, LEVERS[name].words(decision.value))


def _row(topic: str, decision: Decision[Any], value: str) -> Row:
    return Row(topic, value, decision.reason, str(decision.source))


def _variable(variable: EnvVar) -> Row:
    value = "unset" if variable.value is None else variable.value
    return Row(variable.name, value, variable.reason, str(variable.source))


def _processes(processes: Processes) -> str:
    fewest, most = processes.min_nodes, processes.max_nodes
    nodes = str(most) if fewest == most else f"{fewest}:{most}"
    on = "" if nodes == "1" else f" on {nodes} nodes"
    return f"{processes.nproc_per_node}{on}, {processes.backend}"


def _restarts(restarts: Restarts) -> str:
    return f"{restarts.most}, {restarts.on}" if restarts.most else "0"


def _hang(watch: HangWatch) -> str:
    if not watch.on:
        return "off"
    after = "auto" if watch.timeout_s is None else f"{watch.timeout_s} s"
    return f"{after}, {watch.action}"


def _preempt(decided: Preempt) -> str:
    if decided.mode == "signal":
        return "signal"
    every = f", every {decided.every_min} min" if decided.every_min else ""
    return f"snapshot at {decided.signals[0]}{every}"
