"""Makes the plan of a run from the user's settings and the machine."""

from __future__ import annotations

from fasttrain.model.machine import Machine
from fasttrain.model.plan import PLAN_FILE, Invocation, LaunchPlan, Processes
from fasttrain.model.settings import Settings
from fasttrain.planning.advice import hints, warnings
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
    """Return all decisions about a run; a pure function, so a plan can be printed without a run.

    Raises:
        FasttrainError: If the request contradicts itself or the machine.
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
        argv=_command(draft),
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
    # --env may hide devices, too, like the user's environment.
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


# The command: a worker, or torchrun's agent that starts several of them.


def _plan_path(invocation: Invocation) -> str:
    """Return the path of the plan that the workers read."""
    return f"{invocation.run_dir}/{PLAN_FILE}"


def _command(draft: Draft) -> tuple[str, ...]:
    """Return the argv that starts this node's processes."""
    worker = _worker(draft.invocation)
    if draft.processes.value.backend != "torchrun":
        return worker
    return (*_agent(draft), *worker)


def _worker(invocation: Invocation) -> tuple[str, ...]:
    target = invocation.target
    if target.kind == "command":
        return (target.name, *target.args)
    shim = (invocation.python, invocation.shim, _plan_path(invocation))
    return (*shim, target.kind, target.name, *target.args)


def _agent(draft: Draft) -> tuple[str, ...]:
    processes = draft.processes.value
    fewest, most = processes.min_nodes, processes.max_nodes
    nodes = str(most) if fewest == most else f"{fewest}:{most}"
    return (
        draft.invocation.python,
        draft.invocation.agent,
        _plan_path(draft.invocation),
        f"--nnodes={nodes}",
        f"--nproc-per-node={processes.nproc_per_node}",
        *_rendezvous(processes, draft.invocation.run_id),
        f"--max-restarts={processes.max_restarts}",
        "--no-python",  # the worker's command begins with its own Python
        # Without it torchrun's parser drops a "--" that is the command's own first argument.
        "--",
    )


def _rendezvous(processes: Processes, run_id: str) -> tuple[str, ...]:
    if processes.rdzv_endpoint:
        return (
            f"--rdzv-backend={processes.rdzv_backend}",
            f"--rdzv-endpoint={processes.rdzv_endpoint}",
            f"--rdzv-id={processes.rdzv_id}",
            *([f"--rdzv-conf={processes.rdzv_conf}"] if processes.rdzv_conf else []),
        )
    if processes.max_nodes > 1:
        return (
            f"--node-rank={processes.node_rank}",
            f"--master-addr={processes.master_addr}",
            f"--master-port={processes.master_port}",
        )
    # "loopback" is our agent's own backend, whose store listens on loopback only; if torch doesn't
    # allow that, the agent uses c10d. With port 0 the store takes a free port, so two jobs on one
    # node can't meet. The local address replaces the host's name, which may not resolve.
    return (
        "--rdzv-backend=loopback",
        "--rdzv-endpoint=127.0.0.1:0",
        f"--rdzv-id={run_id}",
        "--local-addr=127.0.0.1",
    )
