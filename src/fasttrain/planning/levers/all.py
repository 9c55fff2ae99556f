"""Decides all levers together, and that a command without Python gets none."""

from __future__ import annotations

from dataclasses import fields, replace
from importlib import import_module
from typing import Any

from fasttrain.model.decision import Decision
from fasttrain.model.errors import FasttrainError
from fasttrain.model.levers import LEVERS, Levers
from fasttrain.model.settings import Settings
from fasttrain.planning.describe import BUILT_IN, NO_PYTHON
from fasttrain.planning.gpus import ChosenDevices
from fasttrain.planning.levers.situation import Situation

# Values of the other options that a command without Python can honour by doing nothing.
_IDLE: dict[str, tuple[object, ...]] = {
    "max_steps": (None,),
    "hang_timeout": ("auto", "off"),
    "on_nan": ("off",),
    "preempt": ("signal",),
}
_NAMES = tuple(field.name for field in fields(Levers))


def decide_levers(situation: Situation) -> Levers:
    """Return one decision per lever, each after those that it depends on."""
    decided: dict[str, Decision[Any]] = {}
    for name in _NAMES:
        _decide(name, situation, decided)
    return Levers(**decided)


def _decide(name: str, situation: Situation, decided: dict[str, Decision[Any]]) -> Decision[Any]:
    if name not in decided:
        before = {other: _decide(other, situation, decided) for other in LEVERS[name].after}
        decider = import_module(f"fasttrain.planning.levers.{name}")
        decided[name] = decider.decide(replace(situation, decided=before))
    return decided[name]


def no_levers(settings: Settings, chosen: ChosenDevices) -> Levers:
    """Return every lever off, for a command that is not Python.

    Raises:
        FasttrainError: ``no-python-levers`` when a person named one all the same.
    """
    for name, idle in ({name: LEVERS[name].idle for name in _NAMES} | _IDLE).items():
        setting = getattr(settings, name)
        if setting.source.explicit and setting.value not in idle:
            raise FasttrainError(
                f"{setting.source} ({name} = {setting.value}) can't act on a command",
                why="with --no-python fasttrain starts the command as it is, without its shim",
                fix="leave one of the two out",
                slug="no-python-levers",
            )
    values = {name: LEVERS[name].off_value(chosen.kind, settings) for name in _NAMES}
    return Levers(**{name: Decision(value, NO_PYTHON, BUILT_IN) for name, value in values.items()})
