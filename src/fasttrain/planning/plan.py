"""Makes the plan of a run from the user's settings and the machine."""

from __future__ import annotations

from collections.abc import Iterator

from fasttrain.model.machine import Machine
from fasttrain.model.plan import PLAN_FILE, Invocation, LaunchPlan, Processes
from fasttrain.model.settings import Settings
from fasttrain.planning.describe import device_names, kind_noun, release, torch_phrase
from fasttrain.planning.environment import Draft, compose, parse_env
from fasttrain.planning.gpus import (
    build_fix,
    decide_device,
    decide_gpus,
    unusable_kinds,
)
from fasttrain.planning.guards import decide_guards, decide_preempt, decide_restarts, no_guards
from fasttrain.planning.levers import amp
from fasttrain.planning.levers.all import Situation, decide_levers, no_levers
from fasttrain.planning.processes import (
    decide_loader_workers,
    decide_processes,
    decide_show_ranks,
)

# The warnings and hints of a plan.


# Options of a rendezvous, and the kinds of run that use each: one node, static, elastic.
_RENDEZVOUS_USERS: dict[str, tuple[str, ...]] = {
    "node_rank": ("static",),
    "master_addr": ("static",),
    "master_port": ("static",),
    "rdzv_id": ("elastic",),
    "rdzv_backend": ("elastic",),
    "rdzv_conf": ("elastic",),
}
LEAST_TORCH = (2, 7)  # the oldest with which runs were tried
MEETINGS = {
    "one node": "a run on one node",
    "static": "a static run",
    "elastic": "an elastic run",
}


def warnings(draft: Draft) -> tuple[str, ...]:
    """Return the warnings, one sentence each."""
    parts = (
        *(_found, _old_torch, _cpu_torch, _emulated, _unused_rendezvous),
        *(_unused_scope, _unused_restarts),
        *(_fresh_cache, _one_wandb_run, _other_python, _unused_python),
    )
    return tuple(sentence for part in parts for sentence in part(draft))


def hints(draft: Draft) -> tuple[str, ...]:
    """Return the hints, one sentence each."""
    return (*_idle_devices(draft), *_fp16_instead(draft))


def _idle_devices(draft: Draft) -> Iterator[str]:
    visible = len(draft.chosen.names)
    one = draft.processes.value.nproc_per_node == 1
    if one and visible > 1 and not draft.chosen.explicit:
        devices = kind_noun(draft.kind.value, visible)
        yield f"{devices} are visible to one process: --gpus all starts one process on each."


def _fp16_instead(draft: Draft) -> Iterator[str]:
    """Yield a hint where nothing but the lack of bf16 keeps mixed precision off."""
    processes, facts = draft.processes.value, draft.invocation.facts
    situation = Situation(draft.settings, draft.machine, draft.chosen, processes, facts)
    if draft.invocation.target.kind != "command" and (devices := amp.in_need_of_fp16(situation)):
        yield (
            f"no bf16 on {device_names(devices)}, where fp16 is faster than fp32: {amp.FP16} trains"
            " in fp16, with loss scaling that the script doesn't see, unless it uses mixed"
            " precision itself."
        )


def _found(draft: Draft) -> Iterator[str]:
    yield from (f"{note}." for note in draft.machine.notes)


def _old_torch(draft: Draft) -> Iterator[str]:
    found = draft.machine.torch.release
    if (0, 0) < found < LEAST_TORCH and draft.invocation.target.kind != "command":
        least = release(LEAST_TORCH)
        yield f"{torch_phrase(draft.machine)} is older than {least}: levers and ranks may fail."


def _cpu_torch(draft: Draft) -> Iterator[str]:
    if draft.settings.device.value != "auto" or draft.kind.value != "cpu":
        return
    for kind in unusable_kinds(draft.machine):
        names = device_names(device for device in draft.machine.devices if device.kind == kind)
        yield (
            f"{torch_phrase(draft.machine)} can't use {names}, so the run is on the CPU: "
            f"{build_fix(kind)}."
        )


def _emulated(draft: Draft) -> Iterator[str]:
    chosen = draft.levers.amp.value
    if chosen.precision == "bfloat16" and chosen.device == "cpu" and not draft.machine.cpu.bf16:
        yield "bf16 is emulated on this CPU, slower than fp32: --amp off is faster."
    if chosen.precision == "float16" and chosen.device == "cpu":
        yield "fp16 is emulated on the CPU, slower than fp32: --amp off is faster."


def _unused_rendezvous(draft: Draft) -> Iterator[str]:
    processes = draft.processes.value
    several = "static" if processes.max_nodes > 1 else "one node"
    kind = "elastic" if processes.rdzv_endpoint else several
    for name, users in _RENDEZVOUS_USERS.items():
        setting = getattr(draft.settings, name)
        if setting.source.explicit and kind not in users:
            yield f"{setting.source} has no effect in {MEETINGS[kind]}."


def _fresh_cache(draft: Draft) -> Iterator[str]:
    compiled = draft.levers.compile
    # By default it isn't known whether any kernel will be compiled: the variable's reason says it.
    asked = compiled.source.explicit or compiled.value.asked != "auto"
    if draft.invocation.cache_note and compiled.value.mode != "off" and asked:
        yield f"Compiled kernels are kept for this run alone: {draft.invocation.cache_note}."


def _other_python(draft: Draft) -> Iterator[str]:
    """Yield a warning if another environment than the chosen one is active."""
    invocation = draft.invocation
    if invocation.python_note and invocation.target.kind != "command":
        yield (
            f"{invocation.python_note}, so {invocation.python} runs the script:"
            " fix that, or choose a Python with --python."
        )


def _unused_python(draft: Draft) -> Iterator[str]:
    named = draft.settings.python
    if named.value and draft.invocation.target.kind == "command":
        yield f"{named.source} has no effect with --no-python."


def _one_wandb_run(draft: Draft) -> Iterator[str]:
    """Yield a warning if a mode that was set for wandb applies to rank 0 only."""
    mode = draft.invocation.environ.get("WANDB_MODE") or "disabled"
    if draft.levers.strategy.value.injected and mode != "disabled":
        yield f"WANDB_MODE={mode} applies to rank 0; the other ranks log no run (disabled)."


def _unused_restarts(draft: Draft) -> Iterator[str]:
    """Yield a warning for each option of restarts that has no effect."""
    most, on = draft.settings.max_restarts, draft.settings.restart_on
    if on.source.explicit and not most.value:
        yield f"{on.source} has no effect without --max-restarts."
    if most.value and draft.processes.value.backend == "slurm":
        yield f"{most.source} restarts no rank in place if SLURM starts the ranks."


def _unused_scope(draft: Draft) -> Iterator[str]:
    scope = draft.settings.compile_scope
    if scope.source.explicit and draft.levers.compile.value.mode == "off":
        yield f"{scope.source} has no effect while compile is off."


# Makes the plan of a run from the user's settings and the machine.


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
        loader_workers=decide_loader_workers(settings),
        hints=hints(draft),
        warnings=warnings(draft),
    )


def _draft(settings: Settings, machine: Machine, invocation: Invocation) -> Draft:
    # --env may hide devices, too, like the user's environment.
    environ = invocation.environ | parse_env(settings.env)
    kind = decide_device(settings, machine, environ)
    chosen = decide_gpus(settings.gpus, kind.value, machine, environ)
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
