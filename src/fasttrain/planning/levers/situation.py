"""What the deciders of the levers decide from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fasttrain.model.decision import Decision
from fasttrain.model.machine import Machine
from fasttrain.model.plan import Processes, ScriptFacts
from fasttrain.model.settings import Settings
from fasttrain.planning.describe import kind_noun
from fasttrain.planning.gpus import ChosenDevices
from fasttrain.planning.visible import Slot


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
