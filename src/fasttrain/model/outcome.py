"""The outcome of the levers: one report per rank, one receipt per run."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from fasttrain.model.attempts import Attempt
from fasttrain.model.crash import Crash

RECEIPT_SCHEMA = 1
RECEIPT_FILE = "receipt.json"  # in the run directory
PREEMPTED = "preempted"  # among the counts of a rank that ended after its last snapshot


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
        what: Class of the module or optimizer.
        where: ``file:line`` in the user's code, or a module path.
        count: How often.
    """

    what: str
    where: str = ""
    count: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one lever on one rank.

    Attributes:
        lever: Name of the lever.
        asked: The value that was asked for, in the words of the option.
        state: How it ended.
        reason: Why, unless it simply applied.
        explicit: Whether a person named it, so that anything but ``applied`` must be reported.
        sites: Where it took effect.
        counts: Named totals, such as ``graphs`` or ``forwards``.
        notes: Details worth a line each, such as reasons of graph breaks and recompilations.
        missed: Objects that it could not be applied to, each with the reason. If a person named
            the lever, they make it unmet.
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
    """Speed and memory of one rank; times in seconds, memory in bytes, 0 if unknown.

    Attributes:
        steps: Iterations of the training loop; in each, an optimizer stepped once.
        median_step_s: Median time of a step, the first excluded; on an accelerator, of its own
            time.
        p95_step_s: 95th percentile of the same.
        samples_per_s: Samples that this rank trained on per second of wall-clock time, from the end
            of its first step to the end of the last one that its device has ended, without
            validations in between.
        first_step_s: From the start of the worker to the end of its first step.
        compile_s: Time spent compiling.
        peak_memory_bytes: Peak memory of the device of the steps, or peak resident memory on a
            CPU.
        wall_s: From the start of the worker to this report.
        are_passes: Whether the steps are backward passes, of a script without an optimizer.
        tokens_per_s: As `samples_per_s`, for integer batches ``(batch, seq)``; 0 for others.
        reported_until: If the rank was killed or ended without a last report, the step of its
            latest report: all figures but `steps` are of that time. Else 0.
        resumed_from: Number of the steps that an earlier run or attempt made, up to its snapshot.
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
    """The report of one worker; rewritten while it runs, so that a killed worker leaves one.

    Attributes:
        rank: Global rank.
        device: Torch device of the model, such as ``cuda:0``; empty if no model was called.
        torch_version: Version of the worker's torch; empty if the script never imported it.
        outcomes: One per lever.
        stats: Speed and memory.
        finished: Whether the worker ended by itself, in any way that Python can see.
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
        """True if no model was called and no optimizer made a step, as far as is known."""
        return not (self.device or self.stats.steps)


@dataclass(frozen=True, slots=True)
class Receipt:
    """The receipt of a run.

    Attributes:
        run_id: Name of the run.
        run_dir: Its directory.
        command: The equivalent command line, secrets masked.
        exit_code: The script's exit code, or 128 + signal.
        wall_s: Seconds from start to end, by the launcher's clock.
        ranks: One report for each rank of this node that left one.
        unmet: Levers that were named by the user or armed, and did not take effect.
        warnings: What the user should know before trusting the run.
        hints: What the user might try next.
        crash: Why it failed; None if it succeeded, or was stopped from outside.
        attempts: The failed attempts before the last one.
        interrupted: Whether SIGINT ended it, rather than the script itself after one.
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
    interrupted: bool = False
    schema: int = RECEIPT_SCHEMA
