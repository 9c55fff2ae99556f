"""Explains a plan row by row: what was decided, why, and by whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from shlex import quote
from typing import Any

from fasttrain.model.attempts import HangWatch, Preempt, Restarts
from fasttrain.model.codec import dumps
from fasttrain.model.decision import Decision
from fasttrain.model.errors import printable
from fasttrain.model.levers import LEVERS
from fasttrain.model.plan import PLAN_FILE, EnvVar, LaunchPlan, Processes
from fasttrain.model.secrets import MASK, hide, is_secret_name, mask_args, mask_value, secrets_of

# Hides secrets in a plan before it is written or shown.


def mask_plan(plan: LaunchPlan, environ: Mapping[str, str] | None = None) -> LaunchPlan:
    """Return the plan with ``***`` for secrets in variables and in the script's arguments.

    Args:
        plan: The plan.
        environ: The user's environment, whose secrets may be in the arguments as well.
    """
    values = secrets_of(plan, environ or {})
    args = mask_args(plan.target.args, values)
    own = len(plan.argv) - len(args)  # the script's arguments are the last ones
    return replace(
        plan,
        environment=tuple(_mask_variable(variable, values) for variable in plan.environment),
        target=replace(plan.target, args=args),
        argv=(*plan.argv[:own], *args),
    )


def _mask_variable(variable: EnvVar, values: tuple[str, ...]) -> EnvVar:
    if variable.value is None:
        return variable
    shown = mask_value(variable.name, variable.value, values)
    return replace(variable, value=shown, reason=hide(variable.reason, values))


# Explains a plan row by row: what was decided, why, and by whom.


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
    workers = plan.loader_workers
    return (
        _row("device", plan.device_kind, plan.device_kind.value),
        _row("devices", plan.devices, ",".join(plan.devices.value) or "none"),
        _row("processes", plan.processes, _processes(plan.processes.value)),
        *(_lever(field.name, plan) for field in fields(plan.levers)),
        _row("preempt", plan.preempt, _preempt(plan.preempt.value)),
        _row("hang", plan.guards.hang, _hang(plan.guards.hang.value)),
        _row("nan", plan.guards.nan, plan.guards.nan.value),
        _row("restarts", plan.restarts, _restarts(plan.restarts.value)),
        *([_row("loader_workers", workers, str(workers.value))] if workers else []),
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


# Renders a plan as a POSIX shell script to read, paste or run.


SET_FIRST = "its value is not printed; set it first"

_END = "FASTTRAIN_PLAN"


def shell_script(plan: LaunchPlan, environ: Mapping[str, str]) -> str:
    """Return the script: decisions as comments, the environment, the plan file and the command.

    The script asks for secrets instead of containing them. Arguments that are not valid UTF-8 are
    in it as lone surrogates, so it must be written with ``errors="surrogateescape"``.

    Args:
        plan: The plan to render.
        environ: The user's environment, for a variable's value before the run.
    """
    masked = mask_plan(plan, environ)
    lines = [
        "#!/bin/sh",
        *_header(masked),
        "(",  # a sub-shell, so that pasting the script leaves the user's shell unchanged
        "set -e",
        *_variables(plan, masked, environ),
        *_plan_file(masked),
        f"cd -- {quote(plan.cwd)}",
        f"exec {' '.join(_words(plan.argv, masked.argv))}",
        ")",
    ]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> str:
    return f"# {printable(text)}"


def _header(plan: LaunchPlan) -> Iterator[str]:
    yield _comment(f"fasttrain {plan.fasttrain_version}, run {plan.run_id}")
    cells = [(row.topic, row.value, f"{row.reason} ({row.source})") for row in lever_rows(plan)]
    topics, values = (max(map(len, column)) for column in [*zip(*cells, strict=True)][:2])
    for topic, value, why in cells:
        yield _comment(f"{topic:{topics}}  {value:{values}}  {why}")
    for warning in plan.warnings:
        yield _comment(f"warning: {warning}")
    for hint in plan.hints:
        yield _comment(f"hint: {hint}")


def _variables(plan: LaunchPlan, masked: LaunchPlan, environ: Mapping[str, str]) -> Iterator[str]:
    values = secrets_of(plan, environ)
    for variable, shown in zip(plan.environment, masked.environment, strict=True):
        before = hide(_before(variable, environ), values)
        yield _exported(shown, before, secret=shown.value != variable.value)


def _exported(variable: EnvVar, before: str, *, secret: bool) -> str:
    why = _comment(f"{variable.reason} ({variable.source}){before}")
    if variable.kept:
        return _comment(f"{variable.name}={variable.value} stays: ") + why.removeprefix("# ")
    name = quote(variable.name)
    if variable.value is None:
        return f"unset {name}  {why}"
    if secret:
        ask = f': "${{{variable.name}:?{SET_FIRST}}}"'
        return f"{ask}  {why}\nexport {name}"
    return f"export {name}={quote(variable.value)}  {why}"


def _before(variable: EnvVar, environ: Mapping[str, str]) -> str:
    before = environ.get(variable.name)
    known = is_secret_name(variable.name) or before == variable.value
    if before is None or variable.kept or known:
        return ""
    return f", was {before}"


def _plan_file(plan: LaunchPlan) -> Iterator[str]:
    path = quote(f"{plan.run_dir}/{PLAN_FILE}")
    # The umask is for fasttrain's files only: the training script's get that of the shell.
    yield f"(umask 077; mkdir -p -- {quote(plan.run_dir)}; cat > {path}) <<'{_END}'"
    # The JSON is ASCII without line breaks in strings, so no line of it can end the here-document.
    yield dumps(plan)
    yield _END


def _words(argv: tuple[str, ...], masked: tuple[str, ...]) -> Iterator[str]:
    for index, (word, shown) in enumerate(zip(argv, masked, strict=True)):
        if word == shown:
            yield quote(word)
            continue
        ask = f"${{SECRET_{index}:?an argument is not printed; set SECRET_{index} to it first}}"
        before = shown.removesuffix(MASK)
        split = shown.endswith(MASK) and word.startswith(before) and MASK not in before
        yield f'{quote(before)}"{ask}"' if split and before else f'"{ask}"'
