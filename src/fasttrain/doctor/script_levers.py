"""The outcome of each lever that a script's source predicts.

Reasons are checked in the order in which the worker checks them, and worded as in its receipt: see
``fasttrain/shim/levers``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from fasttrain.model.decision import Decision
from fasttrain.model.levers import LEVERS
from fasttrain.model.outcome import State
from fasttrain.model.plan import Evidence, LaunchPlan
from fasttrain.planning.explain import lever_rows
from fasttrain.source.habits import Habit, Habits

# Classes for which torch has fused kernels. A test compares the names with the worker's, in
# ``fasttrain/shim/levers/optimizer.py``, which the launcher's side must not import.
FUSIBLE = ("Adam", "AdamW", "SGD", "Adagrad")
# Of these, the classes that accept sparse gradients, with which a fused step is impossible.
_TAKE_SPARSE = ("SGD", "Adagrad")
NO_KERNEL = "torch has no fused kernel for it"


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted outcome of a lever.

    Attributes:
        state: As in a receipt; ``armed`` if only the run can tell.
        why: The reason.
        where: ``file:line`` in the user's code that decides; empty where the plan does.
    """

    state: State
    why: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class LeverLine:
    """The predicted outcome of one lever, as doctor prints it.

    Attributes:
        lever: Its name.
        value: The plan's decision.
        verdict: The outcome, as in a receipt; ``armed`` if only the run can tell.
        why: The reason.
        where: ``file:line`` in the user's code that decides; empty where the plan does.
    """

    lever: str
    value: str
    verdict: State
    why: str
    where: str = ""


def lever_lines(plan: LaunchPlan, habits: Habits) -> tuple[LeverLine, ...]:
    """Return the predicted outcome of each lever, in the order of the receipt."""
    values = {row.topic: row.value for row in lever_rows(plan)}
    strategy = plan.levers.strategy.value
    values["dataloader"] = strategy.batch if strategy.injected else "keep"
    lines = []
    for lever in (*(field.name for field in fields(plan.levers)), "dataloader"):
        predict = _PREDICTORS.get(lever, partial(unpredicted, lever))
        found = predict(plan, habits)
        lines.append(LeverLine(lever, values[lever], found.state, found.why, found.where))
    return tuple(lines)


def amp(plan: LaunchPlan, habits: Habits) -> Prediction:
    """Return the outcome of mixed precision."""
    decision = plan.levers.amp
    if decision.value.precision == "off":
        return _left(decision)
    # In the order of a run: a scaler is made before the loop, autocast begins in it.
    own = (Habit.SCALER, Habit.AUTOCAST, Habit.PRECISION)
    if found := habits.sure(*own):
        return Prediction(State.CEDED, "the script manages precision itself", found.where)
    closure = _first(habits, Habit.OPTIMIZER, "LBFGS")
    if decision.value.precision == "float16" and closure:
        return Prediction(State.FAILED, "fp16 can't train with LBFGS and a closure", closure.where)
    if found := habits.any(*own):
        return Prediction(
            State.ARMED, f"steps back if the script turns {found.what} on", found.where
        )
    if found := habits.any(Habit.DTYPE):
        return Prediction(State.ARMED, f"leaves models in {found.what} alone", found.where)
    if found := habits.any(Habit.FRAMEWORK):
        why = f"steps back if {found.what} is set to use mixed precision"
        return Prediction(State.ARMED, why, found.where)
    return Prediction(State.APPLIED, decision.reason)


def compile_(plan: LaunchPlan, habits: Habits) -> Prediction:
    """Return the outcome of torch.compile."""
    decision = plan.levers.compile
    if decision.value.mode == "off":
        return _left(decision)
    if found := habits.sure(Habit.COMPILE):
        return Prediction(State.CEDED, f"the script compiles {found.what} itself", found.where)
    if found := habits.any(Habit.SECOND_DERIVATIVES):
        why = "second derivatives (create_graph=True) can't be compiled"
        return Prediction(State.SKIPPED, why, found.where)
    if found := habits.sure(Habit.DATA_PARALLEL):
        why = "DataParallel copies it to threads at every call"
        return Prediction(State.SKIPPED, why, found.where)
    state = State.ARMED if decision.value.asked == "auto" else State.APPLIED
    return _partly_compiled(habits) or Prediction(state, decision.reason)


def _partly_compiled(habits: Habits) -> Prediction | None:
    """Return the outcome if only a run can tell how much of a model is compiled.

    Source: torch/_dynamo/variables/builder.py of torch 2.13: "Dynamo does not support RNN, GRU, or
    LSTM" unless config.allow_rnn.
    """
    whys = {
        Habit.COMPILE: "steps back where the script compiles {} itself",
        Habit.DATA_PARALLEL: "models in {} are left alone",
        Habit.TORCHSCRIPT: "torch.jit.{} makes TorchScript, which is not compiled",
        Habit.RECURRENT: "torch.compile does not take nn.{}, only what is around it",
    }
    for habit, why in whys.items():
        if found := habits.any(habit):
            return Prediction(State.ARMED, why.format(found.what), found.where)
    return None


def optimizer(plan: LaunchPlan, habits: Habits) -> Prediction:
    """Return the outcome of the optimizers' implementation."""
    decision = plan.levers.optimizer
    if decision.value == "keep":
        return _left(decision)
    if decision.value == "npu":  # only the run knows which optimizers torch_npu has fused
        return Prediction(State.ARMED, decision.reason)
    made = habits.of(Habit.OPTIMIZER)
    if not made:
        return Prediction(State.ARMED, "no optimizer of torch.optim is made in the source")
    chosen = [e for e in habits.of(Habit.IMPLEMENTATION) if e not in habits.open]
    own = {e.where for e in chosen}
    able = [e for e in made if e.what in FUSIBLE and e.where not in own]
    if able:
        return _fused(plan, habits, able)
    if chosen:
        return Prediction(State.CEDED, f"the script chose {chosen[0].what}", chosen[0].where)
    return Prediction(State.SKIPPED, f"{made[0].what}: {NO_KERNEL}", made[0].where)


def _fused(plan: LaunchPlan, habits: Habits, able: list[Evidence]) -> Prediction:
    """Return the outcome for optimizers that have a fused kernel."""
    asked = {e.where: e for e in habits.of(Habit.IMPLEMENTATION)}
    if all(e.where in asked for e in able):
        found = asked[able[0].where]
        why = f"steps back if the script chooses by {found.what}"
        return Prediction(State.ARMED, why, found.where)
    names = {e.what for e in able}
    sparse = habits.any(Habit.SPARSE)
    if sparse and names <= set(_TAKE_SPARSE):
        why = "an optimizer whose gradients are sparse is left alone"
        return Prediction(State.ARMED, why, sparse.where)
    if hook := habits.any(Habit.STEP_HOOK):
        return Prediction(State.ARMED, "leaves an optimizer with step pre-hooks alone", hook.where)
    kind = plan.device_kind.value
    if names == {"Adagrad"} and kind != "cpu":  # torch had its fused kernel on the CPU first
        why = f"not every torch has a fused Adagrad for {kind}"
        return Prediction(State.ARMED, why)
    return Prediction(State.APPLIED, plan.levers.optimizer.reason)


def matmul(plan: LaunchPlan, habits: Habits) -> Prediction:
    """Return the outcome of the precision of matrix products."""
    decision = plan.levers.matmul
    if found := habits.sure(Habit.MATMUL):
        return Prediction(State.CEDED, "the script chooses the precision itself", found.where)
    if decision.value == "keep":
        return _left(decision)
    if found := habits.any(Habit.MATMUL):
        return Prediction(State.ARMED, f"steps back at the script's own {found.what}", found.where)
    return Prediction(State.APPLIED, decision.reason)


def strategy(plan: LaunchPlan, _habits: Habits) -> Prediction:
    """Return who makes the ranks data-parallel: the worker, the script, or nobody."""
    decision = plan.levers.strategy
    if decision.value.injected:
        return Prediction(State.APPLIED, decision.reason)
    if decision.value.mode == "script":
        return Prediction(State.CEDED, decision.reason)
    return _left(decision)


def dataloader(plan: LaunchPlan, habits: Habits) -> Prediction:
    """Return whether ranks share a batch or have one each."""
    decided = plan.levers.strategy.value
    if decided.mode == "script":
        return Prediction(State.CEDED, "the script handles its ranks itself")
    if not decided.injected:
        return Prediction(State.SKIPPED, "there are no ranks to share a batch")
    if not habits.of(Habit.LOADER):
        return Prediction(State.ARMED, "no DataLoader is made in the source")
    ranks = plan.processes.value.world_size
    if decided.batch == "per-rank":
        return Prediction(State.APPLIED, f"{ranks} ranks have batches of their own")
    return Prediction(State.APPLIED, f"{ranks} ranks share each batch")


def unpredicted(name: str, plan: LaunchPlan, _habits: Habits) -> Prediction:
    """Return the outcome of a lever as far as the plan alone tells it."""
    decision: Decision[Any] = getattr(plan.levers, name)
    if LEVERS[name].mode(decision.value) == LEVERS[name].off:
        return _left(decision)
    return Prediction(State.ARMED, decision.reason)


def _left(decision: Decision[Any]) -> Prediction:
    """Return the outcome of a lever that the plan leaves out, as the receipt reports it."""
    state = State.OFF if decision.source.explicit else State.SKIPPED
    return Prediction(state, decision.reason)


def _first(habits: Habits, habit: Habit, what: str) -> Evidence | None:
    return next((e for e in habits.of(habit) if e.what == what and e not in habits.open), None)


# Levers that can be predicted without a run; of the others only the plan is known.
_PREDICTORS: dict[str, Callable[[LaunchPlan, Habits], Prediction]] = {
    "amp": amp,
    "compile": compile_,
    "optimizer": optimizer,
    "matmul": matmul,
    "strategy": strategy,
    "dataloader": dataloader,
}
