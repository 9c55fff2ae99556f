"""Which ranks of this node are shown, and where each of them writes."""

from __future__ import annotations

from collections.abc import Container

from fasttrain.model.plan import LaunchPlan


def log_name(plan: LaunchPlan) -> str:
    """Give the name of the log of what this node's first process prints."""
    return "rank-0.log" if _relays_rank_0(plan) else "agent.log"


def first_rank(plan: LaunchPlan) -> int:
    """Give the lowest rank of this node."""
    processes = plan.processes.value
    return processes.node_rank * processes.nproc_per_node


def shown_ranks(plan: LaunchPlan) -> Container[int]:
    """Give the ranks of this node that are shown; in an elastic run, of all that may be here."""
    processes, first = plan.processes.value, first_rank(plan)
    count = processes.world_size if processes.rdzv_endpoint else processes.nproc_per_node
    here = range(first, first + count)
    return (
        here if plan.show_ranks is None else frozenset(filter(here.__contains__, plan.show_ranks))
    )


def follows(plan: LaunchPlan, rank: int) -> bool:
    """Say whether a rank is shown by what it writes into its own log."""
    return _shows(plan, rank) and not (rank == 0 and _relays_rank_0(plan))


def _shows(plan: LaunchPlan, rank: int) -> bool:
    return plan.show_ranks is None or rank in plan.show_ranks


def _relays_rank_0(plan: LaunchPlan) -> bool:
    """Whether rank 0 writes to the relayed stream; in an elastic run it may be on any node."""
    elastic = plan.processes.value.rdzv_endpoint
    return not elastic and first_rank(plan) == 0 and _shows(plan, 0)
