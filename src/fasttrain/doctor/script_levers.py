"""What each lever would come to with a script, as far as its source tells.

The words are those of the receipt, and the order in which reasons are looked for is the workers':
see ``fasttrain/shim/levers``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fasttrain.model.decision import Decision
from fasttrain.model.levers import LEVERS
from fasttrain.model.outcome import State
from fasttrain.model.plan import Evidence, LaunchPlan
from fasttrain.source.habits import Habit, Habits

# Those that torch has fused kernels for, as in ``fasttrain/shim/levers/optimizer.py``.
FUSIBLE = ("Adam", "AdamW", "SGD", "Adagrad")
# Those that take sparse gradients, and then can't take a fused step.
_TAKE_SPARSE = ("SGD", "Adagrad")
NO_KERNEL = "torch has no fused kernel for it"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a lever would end.

    Attributes:
        state: As in a receipt; ``armed`` where only the run can tell.
        why: The reason.
        where: ``file:line`` in the user's code that decides; empty where the plan does.
    """

    state: State
    why: str
    where: str = ""


def amp(plan: LaunchPlan, habits: Habits) -> Verdict:
    """Return what becomes of mixed precision."""
    decision = plan.levers.amp
    if decision.value.precision == "off":
        return _left(decision)
    own = (Habit.SCALER, Habit.AUTOCAST, Habit.PRECISION)  # a scaler is made before the loop
    if found := habits.sure(*own):
        return Verdict(State.CEDED, "the script manages precision itself", found.where)
    closure = _first(habits, Habit.OPTIMIZER, "LBFGS")
    if decision.value.precision == "float16" and closure:
        return Verdict(State.FAILED, "fp16 can't train with LBFGS and a closure", closure.where)
    if found := habits.any(*own):
        return Verdict(State.ARMED, f"steps back if the script turns {found.what} on", found.where)
    if found := habits.any(Habit.DTYPE):
        return Verdict(State.ARMED, f"leaves models in {found.what} alone", found.where)
    if found := habits.any(Habit.FRAMEWORK):
        why = f"steps back if {found.what} is told to use mixed precision"
        return Verdict(State.ARMED, why, found.where)
    return Verdict(State.APPLIED, decision.reason)


def compile_(plan: LaunchPlan, habits: Habits) -> Verdict:
    """Return what becomes of torch.compile."""
    decision = plan.levers.compile
    if decision.value.mode == "off":
        return _left(decision)
    if found := habits.sure(Habit.COMPILE):
        return Verdict(State.CEDED, f"the script compiles {found.what} itself", found.where)
    if found := habits.any(Habit.SECOND_DERIVATIVES):
        why = "second derivatives (create_graph=True) can't be compiled"
        return Verdict(State.SKIPPED, why, found.where)
    if found := habits.sure(Habit.DATA_PARALLEL):
        why = "DataParallel copies it to threads at every call"
        return Verdict(State.SKIPPED, why, found.where)
    return _partly_compiled(habits) or Verdict(State.APPLIED, decision.reason)


def _partly_compiled(habits: Habits) -> Verdict | None:
    """Return what a run has to show.

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
            return Verdict(State.ARMED, why.format(found.what), found.where)
    return None


def optimizer(plan: LaunchPlan, habits: Habits) -> Verdict:
    """Return what becomes of the optimizers' implementation."""
    decision = plan.levers.optimizer
    if decision.value == "keep":
        return _left(decision)
    if decision.value == "npu":  # which of them has a counterpart is known in the run
        return Verdict(State.ARMED, decision.reason)
    made = habits.of(Habit.OPTIMIZER)
    if not made:
        return Verdict(State.ARMED, "no optimizer of torch.optim is made in the source")
    chosen = [e for e in habits.of(Habit.IMPLEMENTATION) if e not in habits.open]
    own = {e.where for e in chosen}
    able = [e for e in made if e.what in FUSIBLE and e.where not in own]
    if able:
        return _fused(plan, habits, able)
    if chosen:
        return Verdict(State.CEDED, f"the script chose {chosen[0].what}", chosen[0].where)
    return Verdict(State.SKIPPED, f"{made[0].what}: {NO_KERNEL}", made[0].where)


def _fused(plan: LaunchPlan, habits: Habits, able: list[Evidence]) -> Verdict:
    """Return what becomes of those that may take fused steps."""
    asked = {e.where: e for e in habits.of(Habit.IMPLEMENTATION)}
    if all(e.where in asked for e in able):
        found = asked[able[0].where]
        why = f"steps back if the script chooses by {found.what}"
        return Verdict(State.ARMED, why, found.where)
    names = {e.what for e in able}
    sparse = habits.any(Habit.SPARSE)
    if sparse and names <= set(_TAKE_SPARSE):
        why = "an optimizer whose gradients are sparse is left alone"
        return Verdict(State.ARMED, why, sparse.where)
    kind = plan.device_kind.value
    if names == {"Adagrad"} and kind != "cpu":  # its fused kernel began on the CPU alone
        why = f"not every torch has a fused Adagrad for {kind}"
        return Verdict(State.ARMED, why)
    return Verdict(State.APPLIED, plan.levers.optimizer.reason)


def matmul(plan: LaunchPlan, habits: Habits) -> Verdict:
    """Return what becomes of the precision of matrix products."""
    decision = plan.levers.matmul
    if found := habits.sure(Habit.MATMUL):
        return Verdict(State.CEDED, "the script chooses the precision itself", found.where)
    if decision.value == "keep":
        return _left(decision)
    if found := habits.any(Habit.MATMUL):
        return Verdict(State.ARMED, f"steps back at the script's own {found.what}", found.where)
    return Verdict(State.APPLIED, decision.reason)


def strategy(plan: LaunchPlan, _habits: Habits) -> Verdict:
    """Return who makes the ranks one run."""
    decision = plan.levers.strategy
    if decision.value.injected:
        return Verdict(State.APPLIED, decision.reason)
    if decision.value.mode == "script":
        return Verdict(State.CEDED, decision.reason)
    return _left(decision)


def dataloader(plan: LaunchPlan, habits: Habits) -> Verdict:
    """Return what becomes of the batches."""
    decided = plan.levers.strategy.value
    if decided.mode == "script":
        return Verdict(State.CEDED, "the script handles its ranks itself")
    if not decided.injected:
        return Verdict(State.SKIPPED, "there are no ranks to share a batch")
    if not habits.of(Habit.LOADER):
        return Verdict(State.ARMED, "no DataLoader is made in the source")
    ranks = plan.processes.value.world_size
    if decided.batch == "per-rank":
        return Verdict(State.APPLIED, f"{ranks} ranks have batches of their own")
    return Verdict(State.APPLIED, f"{ranks} ranks share each batch")


def unjudged(name: str, plan: LaunchPlan, _habits: Habits) -> Verdict:
    """Return what the plan alone says of a lever."""
    decision: Decision[Any] = getattr(plan.levers, name)
    if LEVERS[name].mode(decision.value) == LEVERS[name].off:
        return _left(decision)
    return Verdict(State.ARMED, decision.reason)


def _left(decision: Decision[Any]) -> Verdict:
    """Return the verdict on a lever that the plan leaves out, as the receipt will have it."""
    state = State.OFF if decision.source.explicit else State.SKIPPED
    return Verdict(state, decision.reason)


def _first(habits: Habits, habit: Habit, what: str) -> Evidence | None:
    return next((e for e in habits.of(habit) if e.what == what and e not in habits.open), None)
