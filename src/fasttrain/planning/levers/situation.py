"""What the deciders of the levers decide from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fasttrain.model.decision import Decision
from fasttrain.model.machine import Machine
from fasttrain.model.plan import Processes, ScriptFacts
from fasttrain.model.settings import Settings
from fasttrain.planning.gpus import ChosenDevices


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
