"""What one node runs, and who follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fasttrain.launch.hang.watch import Nodes, OneNode
from fasttrain.launch.output.display import Display
from fasttrain.model.attempts import Attempt
from fasttrain.model.crash import Crash, Surroundings
from fasttrain.model.hang import Hang
from fasttrain.model.plan import LaunchPlan


class Watch(Protocol):
    """Observes a run from the outside while it is supervised."""

    def heard(self, signum: int) -> None:
        """Note a signal to the launcher."""

    def tick(self) -> None:
        """Do what is due; called a few times a second."""


@dataclass(frozen=True, slots=True)
class NodeRun:
    """What one node runs.

    Attributes:
        plan: The plan; its run directory is there already.
        masked: The same without secrets.
        program: Path of the program.
        environ: The environment as the user has it.
        environment: The environment of the program.
        rank: Rank of the only worker, where there is no agent.
    """

    plan: LaunchPlan
    masked: LaunchPlan
    program: str
    environ: Mapping[str, str]
    environment: Mapping[str, str]
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Observers:
    """Who observes the run.

    Attributes:
        display: Shows the output of the script and the progress.
        look_around: Returns the machine's memory, before the run and after it.
        on_hang: Called when no rank makes progress any more, before the run is stopped.
        watches: Get signals, and a tick a few times a second.
        nodes: Where launchers of several nodes agree on a hang.
    """

    display: Display
    look_around: Callable[[], Surroundings] = Surroundings
    on_hang: Callable[[Hang], None] = lambda _: None
    watches: Sequence[Watch] = field(default=())
    nodes: Nodes = field(default_factory=OneNode)


# The end of what one node ran.


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of this node's processes.

    Attributes:
        exit_code: Of the script, or 128 + signal, or one of `ExitCode`.
        wall_s: Seconds from start to end.
        warnings: What else went wrong, one sentence each.
        crash: Why it failed; None where nothing did.
        attempts: The attempts before the last, which failed.
        steps: The optimizer steps of the last one, by rank, as far as this node has seen them.
        interrupted: Whether SIGINT ended it, rather than the script itself after one.
    """

    exit_code: int
    wall_s: float
    warnings: tuple[str, ...] = ()
    crash: Crash | None = None
    attempts: tuple[Attempt, ...] = ()
    steps: Mapping[int, int] = field(default_factory=dict)
    interrupted: bool = False
