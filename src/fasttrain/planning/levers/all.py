"""Decides all levers together, and that a command without Python gets none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any

from fasttrain.model.decision import Decision
from fasttrain.model.errors import FasttrainError
from fasttrain.model.levers import LEVERS, Levers
from fasttrain.model.machine import Machine
from fasttrain.model.plan import Processes, ScriptFacts
from fasttrain.model.settings import Settings
from fasttrain.planning.describe import BUILT_IN, NO_PYTHON, kind_noun
from fasttrain.planning.gpus import ChosenDevices
from fasttrain.planning.visible import Slot

# What the deciders of the levers decide from.


@dataclass(frozen=True, slots=True)
class Situation:
    """What the user wants, what there is, and what is decided already.

    Attributes:
        settings: What the user wants.
        machine: What there is.
        chosen: The devices.
        processes: The processes.
        facts: What the source of the script says about it.
        decided: The levers that the decider's row names as ``after``.
    """

    settings: Settings
    machine: Machine
    chosen: ChosenDevices
    processes: Processes
    facts: ScriptFacts
    decided: Mapping[str, Decision[Any]] = field(default_factory=dict)

    @property
    def used(self) -> tuple[Slot, ...]:
        """The devices that must support a lever.

        One process trains on the first device that it sees, unless its script names another;
        several train on all.
        """
        return self.chosen.slots[:1] if self._one_of_several_models else self.chosen.slots

    @property
    def which(self) -> str:
        """Part of a reason: which devices are used, where they are not all and it matters."""
        if not self._one_of_several_models:
            return ""
        devices = kind_noun(self.chosen.kind, len(self.chosen.slots))
        return f"; the one process trains on the first of {devices}{self.chosen.order}"

    @property
    def _one_of_several_models(self) -> bool:
        models = {device.name for device in self.chosen.devices}
        return self.processes.nproc_per_node == 1 and len(models) > 1


# Values of the other options that a command without Python can honour by doing nothing.
_IDLE: dict[str, tuple[object, ...]] = {
    "max_steps": (None,),
    "loader_workers": (None, 0),
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
