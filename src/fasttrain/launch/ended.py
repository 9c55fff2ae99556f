"""The end of what one node ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fasttrain.model.attempts import Attempt
from fasttrain.model.crash import Crash


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of this node's processes.

    Attributes:
        exit_code: Of the script, or 128 + signal, or one of `ExitCode`.
        wall_s: Seconds from start to end.
        warnings: What went wrong beside it, one sentence each.
        crash: Why it failed; None where nothing did.
        attempts: The attempts before the last, which failed.
        steps: The optimizer steps of the last one, by rank, as far as this node has seen them.
    """

    exit_code: int
    wall_s: float
    warnings: tuple[str, ...] = ()
    crash: Crash | None = None
    attempts: tuple[Attempt, ...] = ()
    steps: Mapping[int, int] = field(default_factory=dict)
