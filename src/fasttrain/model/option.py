"""How one option of a run is declared: the types and defaults of all stand in `model`."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from fasttrain.model.decision import Setting, Source, SourceKind

DEVICES, LEVERS, PROCESSES, RUN = "Devices", "Levers", "Processes", "Run"  # panels of --help


def option(
    default: Any,
    help: str,
    *,
    panel: str = "Run",
    metavar: str = "",
    minimum: int | None = None,
    maximum: int | None = None,
) -> Any:
    """Declare one option of `Settings`: its default, its help, and its limits.

    Args:
        default: Value when no layer names one.
        help: One line for ``--help``, the completions and the documentation.
        panel: Heading under which ``--help`` lists it.
        metavar: Placeholder for the value in ``--help``.
        minimum: Smallest whole number allowed.
        maximum: Largest one.
    """
    return field(
        default=Setting(default, Source(SourceKind.DEFAULT, "default")),
        metadata={
            "help": help,
            "panel": panel,
            "metavar": metavar,
            "minimum": minimum,
            "maximum": maximum,
        },
    )
