"""What is decided before the environment and the command are composed."""

from __future__ import annotations

from dataclasses import dataclass

from fasttrain.model.decision import Decision
from fasttrain.model.guards import Guards
from fasttrain.model.levers import Levers
from fasttrain.model.machine import Machine
from fasttrain.model.plan import Invocation, Processes
from fasttrain.model.settings import Settings
from fasttrain.model.vendors import DeviceKind
from fasttrain.planning.gpus import Chosen


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan without its environment and its command.

    Attributes:
        settings: What the user wants.
        machine: What there is.
        invocation: The call that is planned for.
        kind: Kind of device.
        chosen: The devices.
        processes: The processes.
        levers: Changes in the worker.
        guards: What is watched while it runs.
    """

    settings: Settings
    machine: Machine
    invocation: Invocation
    kind: Decision[DeviceKind]
    chosen: Chosen
    processes: Decision[Processes]
    levers: Levers
    guards: Guards
