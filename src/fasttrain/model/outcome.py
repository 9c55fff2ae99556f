"""What became of the levers: one report per rank, one receipt per run."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from fasttrain.model.attempts import Attempt
from fasttrain.model.crash import Crash

RECEIPT_SCHEMA = 1
RECEIPT_FILE = "receipt.json"  # in the run directory
PREEMPTED = "preempted"  # among the counts of a rank that ended behind its last snapshot


class State(StrEnum):
    """How a lever ended."""

    OFF = "off"
    SKIPPED = "skipped"
    CEDED = "ceded"
    FAILED = "failed"
    ARMED = "armed"
    APPLIED = "applied"


@dataclass(frozen=True, slots=True)
class Site:
    """One place where a lever took effect, or where the script does the lever's work itself.

    Attributes:
        what: The object: a module's or an optimizer's class.
        where: ``file:line`` in the user's code, or a module path.
        count: How often.
    """

    what: str
    where: str = ""
    count: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one lever on one rank.

    Attributes:
        lever: Its name.
        asked: What was asked of it, in the words of the option.
        state: How it ended.
        reason: Why, unless it simply applied.
        explicit: Whether a person named it, so that anything short of applied must be told.
        sites: Where.
        counts: Named totals, such as ``graphs`` or ``forwards``.
        notes: Details worth a line each, such as graph-break and recompile reasons.
        missed: Objects that it could not be applied to, with the reason of each; unmet where a
            person named the lever.
    """

    lever: str
    asked: str
    state: State
    reason: str = ""
    explicit: bool = False
    sites: tuple[Site, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepStats:
    """Speed and memory of one rank; times in seconds, memory in bytes, 0 where unknown.

    Attributes:
        steps: Iterations, in each of which an optimizer stepped once.
        median_step_s: Median time between two of them, the first excluded.
        p95_step_s: 95th percentile of the same.
        samples_per_s: Samples that this rank trained on, by the wall clock from the end of its
            first step to that of its last one, less the validations between them.
        first_step_s: From the start of the worker to the end of its first step.
        compile_s: Time spent compiling.
        peak_memory_bytes: Peak device memory, or peak resident memory on a CPU.
        wall_s: From the start of the worker to this report.
        are_passes: Whether the steps are backward passes, of a script that makes no optimizer.
        tokens_per_s: The same for batches of integers in two dimensions; 0 for others.
        reported_until: Where the rank was killed or ended itself without a last report, the step of
            its last one, of which all figures but the steps are; 0 where they are of the end.
        resumed_from: How many of the steps an earlier run or attempt made, up to its snapshot.
    """

    steps: int = 0
    median_step_s: float = 0.0
    p95_step_s: float = 0.0
    samples_per_s: float = 0.0
    first_step_s: float = 0.0
    compile_s: float = 0.0
    peak_memory_bytes: int = 0
    wall_s: float = 0.0
    are_passes: bool = False
    tokens_per_s: float = 0.0
    resumed_from: int = 0
    reported_until: int = 0


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one worker did; rewritten while it runs, so that a killed worker leaves its last one.

    Attributes:
        rank: Global rank.
        device: Torch device of the model, such as ``cuda:0``; empty when no model was called.
        torch_version: Torch of the worker; empty when the script never imported it.
        outcomes: One per lever.
        stats: Speed and memory.
        finished: Whether the worker reached its end, by whatever way Python can see.
        warnings: What the user should know before trusting the run.
    """

    rank: int
    device: str
    torch_version: str
    outcomes: tuple[Outcome, ...]
    stats: StepStats
    finished: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def idle(self) -> bool:
        """True if no model was called and no optimizer made a step, as far as can be seen."""
        return not (self.device or self.stats.steps)


@dataclass(frozen=True, slots=True)
class Receipt:
    """The end of a run.

    Attributes:
        run_id: Name of the run.
        run_dir: Its directory.
        command: The command line that it stands for, secrets masked.
        exit_code: The script's exit code, or 128 + signal.
        wall_s: Seconds from start to end as the launcher saw it.
        ranks: One report for each rank of this node that left one.
        unmet: Levers that were named by the user or armed, and did not take effect.
        warnings: What the user should know before trusting the run.
        hints: What the user might try next.
        crash: Why it failed; None where it didn't, or was stopped from outside.
        attempts: The attempts before the last, which failed.
    """

    run_id: str
    run_dir: str
    command: str
    exit_code: int
    wall_s: float
    ranks: tuple[RankReport, ...] = ()
    unmet: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    crash: Crash | None = None
    attempts: tuple[Attempt, ...] = ()
    schema: int = RECEIPT_SCHEMA
