"""Builds the levers that turn several ranks of a single-process script into one run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from fasttrain.model.plan import LaunchPlan
from fasttrain.shim.data_parallel.answers.answers import Answers
from fasttrain.shim.data_parallel.answers.clocks import Clocks
from fasttrain.shim.data_parallel.answers.seeds import Seeds
from fasttrain.shim.data_parallel.context import ParallelContext
from fasttrain.shim.data_parallel.lever_state import LeverState
from fasttrain.shim.data_parallel.levers.per_rank import DataLoaderLever
from fasttrain.shim.data_parallel.levers.replicate import Replicate
from fasttrain.shim.data_parallel.levers.shared_loading import SharedLoaders
from fasttrain.shim.data_parallel.levers.side_effects import SideEffects
from fasttrain.shim.data_parallel.random_streams import RandomStreams
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.hooks.outcome_recorder import Ledger, Lever
from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.hooks.training_mode import TrainingState
from fasttrain.shim.hooks.user_compile import OwnCompile


def parallel_levers(
    plan: LaunchPlan,
    ranks: Ranks,
    roots: RootCalls,
    ledger: Callable[[str, str], Ledger],
    undo: ExitStack,
    lever_state: LeverState,
    compiled: OwnCompile,
) -> list[Lever]:
    """Return the levers in the order of installation.

    Args:
        plan: The plan.
        ranks: All ranks.
        roots: Calls of roots.
        ledger: Creates a lever's ledger from the lever's name and the requested value.
        undo: Uninstalls what the levers share.
        lever_state: Receives what a snapshot needs from the levers.
        compiled: Knows what the script compiles itself.
    """
    strategy = plan.levers.strategy.value
    context = ParallelContext(
        strategy, ranks, roots, RandomStreams(ranks), TrainingState(roots), compiled
    )
    context.streams.agree()
    answers, seeds = Answers(ranks), Seeds(ranks)
    answers.install(undo)
    seeds.install(undo)
    Clocks(answers).install(undo)
    context.training.install(undo)
    replicate = Replicate(ledger("strategy", strategy.mode), context)
    lever_state.ranks, lever_state.streams = ranks, context.streams
    lever_state.states["split calls"] = replicate.splits
    scratch = Path(plan.run_dir) / f"rank-{ranks.rank}.files"
    others: list[Lever] = [SideEffects(ledger("side_effects", "rank 0"), ranks, answers, scratch)]
    if strategy.batch == "per-rank":
        loaders = DataLoaderLever(ledger("dataloader", strategy.batch), context)
        replicate.fed = lambda: bool(loaders.ledger.counts["batches"])
        others.append(loaders)
    else:
        others.append(SharedLoaders(ledger("loading", "once per node"), ranks, answers))
    for lever in others:
        cede = partial(lever.ledger.cede, "the script handles its ranks itself")
        replicate.on_cede.append(cede)
    replicate.on_cede += [answers.close, seeds.close]
    return [replicate, *others]
