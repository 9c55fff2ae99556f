"""Decides what makes several processes one training run."""

from __future__ import annotations

from fasttrain.planning.sources import BUILT_IN, asked
from fasttrain.planning.vendors import VENDORS
from fasttrain.spec.decision import Decision, Source, SourceKind
from fasttrain.spec.errors import FasttrainError
from fasttrain.spec.machine import DeviceKind
from fasttrain.spec.plan import Processes, Strategy, StrategyMode
from fasttrain.spec.script import ScriptFacts
from fasttrain.spec.settings import Settings

SCRIPT = Source(SourceKind.MACHINE, "the script")


def decide_strategy(
    settings: Settings, processes: Processes, kind: DeviceKind, facts: ScriptFacts
) -> Decision[Strategy]:
    """Give who makes the ranks one run: the script, or the shim, or nobody.

    Raises:
        FasttrainError: ``strategy-unavailable`` for fsdp, ``strategy-device`` where ranks can't
            add up their gradients.
    """
    mode, reason, source = _mode(settings, processes, facts)
    vendor = VENDORS[kind]
    if mode in ("ddp", "fsdp") and not vendor.collectives:
        raise FasttrainError(
            f"{processes.world_size} processes can't train one model on {kind}",
            why=f"torch.distributed has no collectives for it, and {reason}",
            fix="use one process, or --strategy none for copies that have nothing to do with"
            " each other",
            slug="strategy-device",
        )
    strategy = Strategy(
        mode,
        settings.batch.value,
        settings.reduce_loss.value,
        settings.sync_bn.value,
        collectives=vendor.collectives,
        visibility=vendor.visibility,
    )
    return Decision(strategy, reason, source)


def _mode(
    settings: Settings, processes: Processes, facts: ScriptFacts
) -> tuple[StrategyMode, str, Source]:
    setting = settings.strategy
    if setting.value == "none":
        return "none", asked(setting), setting.source
    if setting.value == "fsdp":
        raise FasttrainError(
            "--strategy fsdp was asked for, but this version does not have it",
            why="it averages gradients over whole models, and does not shard them",
            fix="use --strategy ddp, or auto",
            slug="strategy-unavailable",
        )
    if processes.world_size == 1:
        return "none", "one process needs none", setting.source
    if setting.value == "ddp":
        return "ddp", asked(setting), setting.source
    if facts.handles_ranks:
        found = facts.handles_ranks
        reason = f"the script handles its ranks itself: {found.what} at {found.where}"
        return "script", reason, SCRIPT
    reason = "nothing in the script handles ranks, so it is made data-parallel"
    return "ddp", reason, BUILT_IN if facts == ScriptFacts() else SCRIPT
