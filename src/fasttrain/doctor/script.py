"""What fasttrain would do with a script here, and what its author could change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial

from fasttrain.doctor import script_levers
from fasttrain.doctor.script_habits import judge_habits
from fasttrain.doctor.script_levers import Verdict
from fasttrain.model.examination import Finding, Severity
from fasttrain.model.machine import Machine
from fasttrain.model.outcome import State
from fasttrain.model.plan import LaunchPlan, ScriptFacts
from fasttrain.planning.describe import and_join, counted
from fasttrain.planning.explain import lever_rows
from fasttrain.source.habits import Habits

# What can be said without a run; of other levers only that is known which the plan says.
_JUDGES: dict[str, Callable[[LaunchPlan, Habits], Verdict]] = {
    "amp": script_levers.amp,
    "compile": script_levers.compile_,
    "optimizer": script_levers.optimizer,
    "matmul": script_levers.matmul,
    "strategy": script_levers.strategy,
    "dataloader": script_levers.dataloader,
}
_ENDS = {
    State.CEDED: "left to the script",
    State.SKIPPED: "can't be applied",
    State.FAILED: "the run would be refused",
    State.ARMED: "only a run can tell",
}
_FIXES = {
    ("amp", State.CEDED): "nothing; or take the script's own mixed precision out",
    ("amp", State.FAILED): "use --amp bf16 or --amp off",
    ("compile", State.CEDED): "nothing; or take the script's own torch.compile out",
    ("compile", State.SKIPPED): "use --compile off",
    ("optimizer", State.CEDED): "nothing; or take that argument out",
    ("optimizer", State.SKIPPED): f"nothing; {and_join(script_levers.FUSIBLE)} have such kernels",
    ("matmul", State.CEDED): "nothing; or take that line out",
}
_TRY = "start it with --max-steps 20, and read the receipt"


@dataclass(frozen=True, slots=True)
class LeverLine:
    """What would become of one lever.

    Attributes:
        lever: Its name.
        value: What the plan has decided.
        verdict: How it would end, as in a receipt; ``armed`` where only the run can tell.
        why: The reason.
        where: ``file:line`` in the user's code that decides; empty where the plan does.
    """

    lever: str
    value: str
    verdict: State
    why: str
    where: str = ""


def lever_lines(plan: LaunchPlan, habits: Habits) -> tuple[LeverLine, ...]:
    """Return one line for each lever."""
    values = {row.topic: row.value for row in lever_rows(plan)}
    strategy = plan.levers.strategy.value
    values["dataloader"] = strategy.batch if strategy.injected else "keep"
    lines = []
    for lever in (*(field.name for field in fields(plan.levers)), "dataloader"):
        judge = _JUDGES.get(lever, partial(script_levers.unjudged, lever))
        verdict = judge(plan, habits)
        line = LeverLine(lever, values[lever], verdict.state, verdict.why, verdict.where)
        lines.append(line)
    return tuple(lines)


def judge_script(
    habits: Habits, facts: ScriptFacts, plan: LaunchPlan, machine: Machine
) -> tuple[Finding, ...]:
    """Return what its author should know of a script before it runs here.

    Args:
        habits: What its source shows.
        facts: Whether it handles ranks, and what could not be read.
        plan: What fasttrain would do with it.
        machine: Where.
    """
    return (
        *_held_back(plan, habits),
        *_ranks(facts, plan),
        *judge_habits(habits, plan, machine),
        *_unread(facts),
    )


def _held_back(plan: LaunchPlan, habits: Habits) -> Iterator[Finding]:
    """Tell of levers that the script keeps from acting, or may."""
    for line in lever_lines(plan, habits):
        if not line.where or line.value == "keep":
            continue
        yield Finding(
            f"script-{line.lever}",
            _severity(line, plan),
            f"{line.lever} {line.value}: {_ENDS[line.verdict]}",
            line.why,
            _FIXES.get((line.lever, line.verdict), _TRY),
            line.where,
        )


def _severity(line: LeverLine, plan: LaunchPlan) -> Severity:
    """Return an error for a run that is refused, a warning for what a person has named in vain."""
    if line.verdict is State.FAILED:
        return "error"
    explicit = getattr(plan.levers, line.lever).source.explicit
    return "warning" if explicit and line.verdict is not State.ARMED else "hint"


def _ranks(facts: ScriptFacts, plan: LaunchPlan) -> Iterator[Finding]:
    found, strategy = facts.handles_ranks, plan.levers.strategy.value
    if found and strategy.injected:
        yield Finding(
            "script-strategy",
            "warning",
            f"--strategy {strategy.mode} for a script that handles its ranks itself",
            f"{found.what} stands there, and only one of the two can average gradients",
            "use --strategy auto, which leaves the ranks to the script",
            found.where,
        )


def _unread(facts: ScriptFacts) -> Iterator[Finding]:
    if facts.unread:
        first = facts.unread[0]
        yield Finding(
            "script-unread",
            "hint",
            f"{counted(len(facts.unread), 'module')} of the script's could not be read: {first}",
            "what stands there is not in this report",
            "mend it, or compare with the receipt of a run",
        )
