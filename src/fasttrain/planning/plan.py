"""Turns what the user wants and what there is into the plan of a run."""

from __future__ import annotations

from fasttrain.model.machine import Machine
from fasttrain.model.plan import Invocation, LaunchPlan
from fasttrain.model.settings import Settings
from fasttrain.planning.advice import hints, warnings
from fasttrain.planning.command import command
from fasttrain.planning.device import decide_device
from fasttrain.planning.draft import Draft
from fasttrain.planning.environment import compose, parse_env
from fasttrain.planning.gpus import decide_gpus
from fasttrain.planning.guards import decide_guards, decide_preempt, decide_restarts, no_guards
from fasttrain.planning.levers.all import decide_levers, no_levers
from fasttrain.planning.levers.situation import Situation
from fasttrain.planning.processes import decide_processes, decide_show_ranks
from fasttrain.planning.visible import visible_slots


def make_plan(settings: Settings, machine: Machine, invocation: Invocation) -> LaunchPlan:
    """Give all that is decided about a run; pure, so that it can be printed before anything starts.

    Raises:
        FasttrainError: The request contradicts itself or the machine.
    """
    draft = _draft(settings, machine, invocation)
    return LaunchPlan(
        fasttrain_version=invocation.version,
        run_id=invocation.run_id,
        run_dir=invocation.run_dir,
        target=invocation.target,
        cwd=invocation.cwd,
        device_kind=draft.kind,
        devices=draft.chosen.decision,
        processes=draft.processes,
        environment=compose(draft),
        levers=draft.levers,
        guards=draft.guards,
        restarts=decide_restarts(settings, draft.processes.value),
        argv=command(draft),
        shutdown_timeout_s=settings.shutdown_timeout.value,
        show_ranks=decide_show_ranks(settings.show_ranks, draft.processes.value),
        max_steps=settings.max_steps.value,
        strict=settings.strict.value,
        preempt=decide_preempt(settings, draft.processes.value, draft.levers, invocation),
        python=invocation.python_decision,
        hints=hints(draft),
        warnings=warnings(draft),
    )


def _draft(settings: Settings, machine: Machine, invocation: Invocation) -> Draft:
    # --env can narrow what is visible too, as if the user's own environment had.
    environ = invocation.environ | parse_env(settings.env)
    kind = decide_device(settings, machine, environ)
    slots = visible_slots(machine, kind.value, environ)
    chosen = decide_gpus(settings.gpus, kind.value, slots, machine)
    by_slurm = invocation.ranks_by_slurm
    processes = decide_processes(settings, chosen, by_slurm=by_slurm)
    if invocation.target.kind == "command":
        levers, guards = no_levers(settings, chosen), no_guards()
    else:
        facts = invocation.facts
        levers = decide_levers(Situation(settings, machine, chosen, processes.value, facts))
        guards = decide_guards(settings, machine)
    return Draft(settings, machine, invocation, kind, chosen, processes, levers, guards)
