"""Decides what makes several processes one training run."""

from __future__ import annotations

from fasttrain.planning.sources import asked
from fasttrain.spec.decision import Decision, Setting
from fasttrain.spec.errors import FasttrainError
from fasttrain.spec.plan import Processes
from fasttrain.spec.settings import StrategyChoice

_SUPPORTED = ("auto", "none")


def decide_strategy(
    setting: Setting[StrategyChoice], processes: Processes
) -> Decision[StrategyChoice]:
    """Give the strategy, which in this version leaves the ranks to the script.

    Raises:
        FasttrainError: ``strategy-unavailable`` for ddp and fsdp.
    """
    if setting.value not in _SUPPORTED:
        raise FasttrainError(
            f"--strategy {setting.value} was asked for, but this version does not have it",
            why="it starts several processes only for scripts that handle ranks themselves",
            fix="use --strategy auto with such a script, or one process",
            slug="strategy-unavailable",
        )
    alone = processes.world_size == 1
    rest = "one process needs none" if alone else "the script must handle its ranks itself"
    return Decision(setting.value, f"{asked(setting)}; {rest}", setting.source)
