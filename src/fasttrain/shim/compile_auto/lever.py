"""Builds ``--compile auto`` for one process, for the rank that decides, or for one that follows."""

from __future__ import annotations

from fasttrain.model.decision import Decision
from fasttrain.model.levers import Compile
from fasttrain.shim.compile_auto.auto import AutoCompile
from fasttrain.shim.compile_auto.peers import NoOthers
from fasttrain.shim.compile_auto.switch import SwitchedProcess
from fasttrain.shim.hooks.outcome_recorder import Lever, OutcomeRecorder, Shared
from fasttrain.shim.process import entry


def build(shared: Shared, decision: Decision[Compile], recorder: OutcomeRecorder) -> list[Lever]:
    """Build the lever."""
    auto = _of_this_process(shared, decision, recorder)
    auto.lever.on_compiling += shared.on_compiling
    shared.compile_s = lambda: auto.lever.compile_s
    return [auto]


def _of_this_process(
    shared: Shared, decision: Decision[Compile], recorder: OutcomeRecorder
) -> SwitchedProcess:
    plan = shared.plan
    alone = plan.processes.value.backend == "direct" or int(entry.get("WORLD_SIZE", "1")) == 1
    if alone or shared.child:
        return AutoCompile(shared, decision, recorder, NoOthers())
    # Not for one process, whose start it would make longer.
    from fasttrain.shim.compile_auto.follower import FollowingCompile
    from fasttrain.shim.compile_auto.ranks import Follower, Leader
    from fasttrain.shim.tune.ranks import ranks_of_run

    ranks = ranks_of_run(shared.lever_state, plan.levers.strategy.value.collectives)
    if ranks.rank == 0:
        return AutoCompile(shared, decision, recorder, Leader(ranks, shared.meter))
    return FollowingCompile(shared, decision, recorder, Follower(ranks, shared.meter))
