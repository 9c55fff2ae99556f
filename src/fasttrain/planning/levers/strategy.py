"""Decides what makes several processes one training run."""

from __future__ import annotations

from dataclasses import replace

from fasttrain.model.decision import Decision, Source, SourceKind
from fasttrain.model.errors import FasttrainError
from fasttrain.model.levers import Strategy, StrategyMode
from fasttrain.model.plan import Processes, ScriptFacts
from fasttrain.model.settings import Settings
from fasttrain.model.vendors import VENDORS
from fasttrain.planning.describe import BUILT_IN, asked, release, torch_phrase
from fasttrain.planning.levers.all import Situation

_SHARDS_SINCE = (2, 6)  # as a public function
SCRIPT = Source(SourceKind.MACHINE, "the script")

ONE_PROCESS = "one process needs none"
MADE_PARALLEL = "nothing in the script handles ranks, so it is made data-parallel"


def decide(situation: Situation) -> Decision[Strategy]:
    """Return who makes the ranks one run: the script, or the shim, or nobody.

    Raises:
        FasttrainError: ``strategy-device`` where ranks can't add up their gradients,
            ``strategy-torch`` where torch can't shard.
    """
    settings, machine, processes = situation.settings, situation.machine, situation.processes
    kind = situation.chosen.kind
    mode, reason, source = _mode(settings, processes, situation.facts)
    vendor = VENDORS[kind]
    if mode in ("ddp", "fsdp") and not vendor.collectives:
        raise FasttrainError(
            f"{processes.world_size} processes can't train one model on {kind}",
            why=f"torch.distributed has no collectives for it, and {reason}",
            fix="use one process, or --strategy none for copies that have nothing to do with"
            " each other",
            slug="strategy-device",
        )
    if mode == "fsdp" and machine.torch.release < _SHARDS_SINCE:
        raise FasttrainError(
            "--strategy fsdp was asked for, but this torch can't shard in place",
            why=f"fully_shard came with {release(_SHARDS_SINCE)}, and there is"
            f" {torch_phrase(machine)}",
            fix="upgrade torch, or use --strategy ddp",
            slug="strategy-torch",
        )
    copies = _are_copies(mode, processes, situation.facts)
    if copies and vendor.visibility:
        reason += f"; each copy sees one {vendor.noun} of its own, as device 0"
    strategy = Strategy(mode, settings.batch.value, collectives=vendor.collectives)
    if strategy.injected or copies:
        strategy = replace(strategy, visibility=vendor.visibility)
    return Decision(strategy, reason, source)


def _are_copies(mode: StrategyMode, processes: Processes, facts: ScriptFacts) -> bool:
    """True if nothing in unrelated processes would keep them from training on one device.

    A script that handles ranks chooses its device by them; one whose processes SLURM starts may do
    so by SLURM's variables.
    """
    unaware = not facts.handles_ranks and processes.backend != "slurm"
    return mode == "none" and processes.nproc_per_node > 1 and unaware


def _mode(
    settings: Settings, processes: Processes, facts: ScriptFacts
) -> tuple[StrategyMode, str, Source]:
    setting = settings.strategy
    if setting.value == "none":
        return "none", asked(setting), setting.source
    if processes.world_size == 1:
        return "none", ONE_PROCESS, setting.source
    if setting.value in ("ddp", "fsdp"):
        return setting.value, asked(setting), setting.source
    if facts.handles_ranks:
        found = facts.handles_ranks
        reason = f"the script handles its ranks itself: {found.what} at {found.where}"
        return "script", reason, SCRIPT
    return "ddp", MADE_PARALLEL, BUILT_IN if facts == ScriptFacts() else SCRIPT
