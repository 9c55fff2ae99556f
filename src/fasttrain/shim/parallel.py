"""Builds the levers that make several ranks of an unaware script one run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from fasttrain.shim.data_parallel.answers import Answers
from fasttrain.shim.data_parallel.clocks import Clocks
from fasttrain.shim.data_parallel.seeds import Seeds
from fasttrain.shim.ledger import Ledger, Lever
from fasttrain.shim.levers.dataloader import DataLoaderLever
from fasttrain.shim.levers.loading import SharedLoaders
from fasttrain.shim.levers.replicate import Replicate
from fasttrain.shim.levers.side_effects import SideEffects
from fasttrain.shim.own_compile import OwnCompile
from fasttrain.shim.parallel_context import ParallelContext
from fasttrain.shim.random_streams import RandomStreams
from fasttrain.shim.ranks import Ranks
from fasttrain.shim.roots import RootCalls
from fasttrain.shim.snapshots.kept import Kept
from fasttrain.shim.training_state import TrainingState
from fasttrain.spec.plan import LaunchPlan


def parallel_levers(
    plan: LaunchPlan,
    ranks: Ranks,
    roots: RootCalls,
    ledger: Callable[[str, str], Ledger],
    undo: ExitStack,
    kept: Kept,
    compiled: OwnCompile,
) -> list[Lever]:
    """Give the levers, in the order in which they are to be installed.

    Args:
        plan: The plan.
        ranks: All ranks.
        roots: Calls of roots.
        ledger: Makes the ledger of a lever from its name and what is asked of it.
        undo: Takes away what the levers share.
        kept: Takes what a snapshot has to hold.
        compiled: What the script compiles itself.
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
    kept.ranks, kept.streams = ranks, context.streams
    kept.states["split calls"] = replicate.splits
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
