"""Builds the levers that turn several ranks of a single-process script into one run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from fasttrain.model.decision import Decision
from fasttrain.model.levers import Strategy
from fasttrain.shim.data_parallel.answers.answers import Answers
from fasttrain.shim.data_parallel.answers.clocks import Clocks
from fasttrain.shim.data_parallel.answers.lever import SideEffects
from fasttrain.shim.data_parallel.answers.seeds import Seeds
from fasttrain.shim.data_parallel.context import LeverState, ParallelContext
from fasttrain.shim.data_parallel.loading.lever import SharedLoaders
from fasttrain.shim.data_parallel.per_rank import DataLoaderLever
from fasttrain.shim.data_parallel.random_streams import RandomStreams
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.data_parallel.replicate import Replicate
from fasttrain.shim.hooks.loop import TrainingState
from fasttrain.shim.hooks.outcome_recorder import Lever, OutcomeRecorder, Shared
from fasttrain.shim.process import entry


def build(shared: Shared, decision: Decision[Strategy], recorder: OutcomeRecorder) -> list[Lever]:
    """Return the levers, in the order in which they are to be installed."""
    plan, strategy = shared.plan, decision.value
    if strategy.batch != "per-rank":
        shared.meter.throughput.part = 1 / int(entry.get("WORLD_SIZE", "1"))
    if plan.strict and not decision.source.explicit:
        # Whoever asks for several ranks wants them to be of use.
        recorder.explicit = plan.processes.source.explicit
    agent = plan.processes.value.backend == "torchrun"
    ranks = Ranks.at_store(strategy.collectives, agent=agent)
    companion = partial(shared.companion, decision=decision, explicit=False)
    return _levers(shared, strategy, ranks, recorder, companion)


def _levers(
    shared: Shared,
    strategy: Strategy,
    ranks: Ranks,
    recorder: OutcomeRecorder,
    companion: Callable[[str, str], OutcomeRecorder],
) -> list[Lever]:
    roots, undo = shared.roots, shared.undo
    lever_state: LeverState = shared.lever_state
    context = ParallelContext(
        strategy, ranks, roots, RandomStreams(ranks), TrainingState(roots), shared.user_compile
    )
    context.streams.agree()
    context.streams.install(undo)
    answers, seeds = Answers(ranks), Seeds(ranks)
    answers.install(undo)
    seeds.install(undo)
    Clocks(answers).install(undo)
    context.training.install(undo)
    replicate = Replicate(recorder, context)
    lever_state.ranks, lever_state.streams = ranks, context.streams
    lever_state.apart = answers.apart
    lever_state.states["split calls"] = replicate.splits
    scratch = Path(shared.plan.run_dir) / f"rank-{ranks.rank}.files"
    others: list[Lever] = [
        SideEffects(companion("side_effects", "rank 0"), ranks, answers, scratch)
    ]
    if strategy.batch == "per-rank":
        loaders = DataLoaderLever(companion("dataloader", strategy.batch), context)
        replicate.fed = lambda: bool(loaders.recorder.counts["batches"])
        others.append(loaders)
    else:
        others.append(SharedLoaders(companion("loading", "once per node"), ranks, answers))
    for lever in others:
        cede = partial(lever.recorder.cede, "the script handles its ranks itself")
        replicate.on_cede.append(cede)
    replicate.on_cede += [answers.close, seeds.close, shared.meter.throughput.count_whole]
    return [replicate, *others]
