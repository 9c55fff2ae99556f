"""Builds the levers that make several ranks of an unaware script one run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from fasttrain.shim.batches import Batches
from fasttrain.shim.ledger import Ledger, Lever
from fasttrain.shim.levers.dataloader import DataLoaderLever
from fasttrain.shim.levers.reduce_loss import ReduceLoss
from fasttrain.shim.levers.replicate import Replicate
from fasttrain.shim.levers.side_effects import SideEffects
from fasttrain.shim.levers.sync_bn import SyncBatchNormLever
from fasttrain.shim.loss_weights import LossWeights
from fasttrain.shim.random_streams import RandomStreams
from fasttrain.shim.ranks import Ranks
from fasttrain.shim.roots import RootCalls
from fasttrain.shim.training_state import TrainingState
from fasttrain.spec.plan import LaunchPlan


def parallel_levers(
    plan: LaunchPlan,
    ranks: Ranks,
    roots: RootCalls,
    ledger: Callable[[str, str], Ledger],
    undo: ExitStack,
) -> list[Lever]:
    """Give the levers, in the order in which they are to be installed.

    Args:
        plan: The plan.
        ranks: All ranks.
        roots: Calls of roots.
        ledger: Makes the ledger of a lever from its name and what is asked of it.
        undo: Takes away what the levers share.
    """
    strategy = plan.levers.strategy.value
    streams, batches, training = RandomStreams(ranks), Batches(), TrainingState(roots)
    streams.agree()
    training.install(undo)
    weights = LossWeights(ranks, batches)
    weights.values = strategy.reduce_loss != "off"
    replicate = Replicate(
        ledger("strategy", strategy.mode), roots, ranks, streams, training, batches, weights,
        # With loss scaling the ranks must find the same overflows behind every pass.
        accumulates=plan.levers.amp.value.precision != "float16", sync_bn=strategy.sync_bn,
        sharded=strategy.mode == "fsdp",
    )  # fmt: skip
    loader = DataLoaderLever(
        strategy.batch, ledger("dataloader", strategy.batch), ranks, streams, training, batches
    )
    scratch = Path(plan.run_dir) / f"rank-{ranks.rank}.files"
    effects = SideEffects(ledger("side_effects", "rank 0"), ranks, scratch)
    levers: list[Lever] = [replicate, loader, effects]
    if strategy.sync_bn:
        levers.append(SyncBatchNormLever(ledger("sync_bn", "on"), ranks, batches))
    if weights.values:
        reduce = ReduceLoss(
            strategy.reduce_loss, ledger("reduce_loss", strategy.reduce_loss), ranks, batches,
            weights,
        )  # fmt: skip
        replicate.after_backward.append(reduce.after_backward)
        levers.append(reduce)
    return levers
