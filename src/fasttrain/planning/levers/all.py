"""Decides all levers together, and that a command without Python gets none."""

from __future__ import annotations

from fasttrain.model.decision import Decision
from fasttrain.model.errors import FasttrainError
from fasttrain.model.machine import Machine
from fasttrain.model.plan import Amp, Compile, Levers, Processes, ScriptFacts, Strategy
from fasttrain.model.settings import Settings
from fasttrain.planning.describe import BUILT_IN, NO_PYTHON
from fasttrain.planning.gpus import Chosen
from fasttrain.planning.levers.amp import decide_amp
from fasttrain.planning.levers.compile import decide_compile
from fasttrain.planning.levers.matmul import decide_matmul
from fasttrain.planning.levers.optimizer import decide_optimizer
from fasttrain.planning.levers.strategy import decide_strategy

# Values of the options that a command without Python can honour by doing nothing.
_IDLE: dict[str, tuple[object, ...]] = {
    "amp": ("auto", "off"),
    "compile": ("off",),
    "optimizer": ("auto", "keep"),
    "matmul": ("auto",),
    "strategy": ("auto", "none"),
    "max_steps": (None,),
    "hang_timeout": ("auto", "off"),
    "on_nan": ("off",),
    "preempt": ("signal",),
}


def decide_levers(
    settings: Settings,
    machine: Machine,
    chosen: Chosen,
    processes: Processes,
    facts: ScriptFacts,
) -> Levers:
    """Return one decision per lever, in the order in which they depend on each other."""
    amp = decide_amp(settings.amp, machine, chosen)
    strategy = decide_strategy(settings, machine, processes, chosen.kind, facts)
    return Levers(
        amp=amp,
        compile=decide_compile(settings, machine, chosen.kind, strategy.value),
        optimizer=decide_optimizer(settings.optimizer, machine, chosen.kind),
        matmul=decide_matmul(settings.matmul, chosen, amp.value),
        strategy=strategy,
    )


def no_levers(settings: Settings, chosen: Chosen) -> Levers:
    """Give every lever off, for a command that is not Python.

    Raises:
        FasttrainError: ``no-python-levers`` when a person named one all the same.
    """
    for name, idle in _IDLE.items():
        setting = getattr(settings, name)
        if setting.source.explicit and setting.value not in idle:
            raise FasttrainError(
                f"{setting.source} ({name} = {setting.value}) can't act on a command",
                why="with --no-python fasttrain starts the command as it is, without its shim",
                fix="leave one of the two out",
                slug="no-python-levers",
            )
    scope = settings.compile_scope.value
    return Levers(
        amp=Decision(Amp("off", chosen.kind), NO_PYTHON, BUILT_IN),
        compile=Decision(Compile("off", "off", scope), NO_PYTHON, BUILT_IN),
        optimizer=Decision("keep", NO_PYTHON, BUILT_IN),
        matmul=Decision("keep", NO_PYTHON, BUILT_IN),
        strategy=Decision(Strategy("none"), NO_PYTHON, BUILT_IN),
    )
