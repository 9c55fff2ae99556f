"""Composes the exact command: the worker, and torchrun's agent around several of them."""

from __future__ import annotations

from fasttrain.model.plan import PLAN_FILE, Invocation, Processes
from fasttrain.planning.draft import Draft


def plan_path(invocation: Invocation) -> str:
    """Return the path of the plan that the workers read."""
    return f"{invocation.run_dir}/{PLAN_FILE}"


def command(draft: Draft) -> tuple[str, ...]:
    """Return the argv that starts this node's processes."""
    worker = _worker(draft.invocation)
    if draft.processes.value.backend != "torchrun":
        return worker
    return (*_agent(draft), *worker)


def _worker(invocation: Invocation) -> tuple[str, ...]:
    target = invocation.target
    if target.kind == "command":
        return (target.name, *target.args)
    shim = (invocation.python, invocation.shim, plan_path(invocation))
    return (*shim, target.kind, target.name, *target.args)


def _agent(draft: Draft) -> tuple[str, ...]:
    processes = draft.processes.value
    fewest, most = processes.min_nodes, processes.max_nodes
    nodes = str(most) if fewest == most else f"{fewest}:{most}"
    return (
        draft.invocation.python,
        draft.invocation.agent,
        plan_path(draft.invocation),
        f"--nnodes={nodes}",
        f"--nproc-per-node={processes.nproc_per_node}",
        *_rendezvous(processes, draft.invocation.run_id),
        f"--max-restarts={processes.max_restarts}",
        "--no-python",
        # Without it torchrun's parser drops a "--" that is the first argument of a command.
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
    # The agent's own, which binds to loopback; with a torch that can't, the agent takes c10d. Port
    # 0 lets the store take a free one, so that two jobs on one node don't meet; the local address
    # keeps the host's name, which may not resolve, out of it.
    return (
        "--rdzv-backend=loopback",
        "--rdzv-endpoint=127.0.0.1:0",
        f"--rdzv-id={run_id}",
        "--local-addr=127.0.0.1",
    )
