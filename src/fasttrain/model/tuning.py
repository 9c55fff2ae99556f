"""What ``fasttrain tune`` asks of a worker, and what the worker has found."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

TUNING_FILE = "tuning.json"  # in the run directory
TUNING_STATE_FILE = "tuning-state.json"  # what the next start of the script goes on from

# What sums in another order are rounded by at most: inductor's BatchNorm was 20 times as far from
# fp64 as torch's own, which adds up in fp64 on a CPU (torch 2.13).
REORDERED = 2.0**-18
UNBOUNDED = 1e9  # the upper end of a ratio of which nothing is known

Verdict = Literal["faster", "slower", "same", "undecided", "no effect", "wrong"]
End = Literal["running", "decided", "budget", "script", "children"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a run that tunes is asked for.

    Attributes:
        budget_s: Seconds from the worker's start, after which nothing more is compared.
        scratch: Folder that takes what the script writes, removed after the run; empty if the
            script may write its files.
        keep: Folders in which writes are real, such as the run directory.
        seed: Seed of the order of blocks.
        earlier: Run directory of the start of the script before this one, whose comparisons go on;
            empty at the first start.
    """

    budget_s: float
    scratch: str
    keep: tuple[str, ...]
    seed: int = 0
    earlier: str = ""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of times with and without a lever; below 1 is faster.

    Attributes:
        low: Lower end of the confidence sequence, 0 while nothing is known.
        middle: Median of the ratios of pairs, 1 while nothing is known.
        high: Upper end, `UNBOUNDED` while nothing is known.
    """

    low: float
    middle: float
    high: float

    def leaves_open(self, verdict: Verdict) -> bool:
        """True if this ratio, of wall times, has not decided: processor time has."""
        return verdict in ("faster", "slower") and self.low <= 1.0 <= self.high


@dataclass(frozen=True, slots=True)
class Parity:
    """How far the results with a lever are from those without.

    Attributes:
        right: True if within what the lever's rounding explains, False if not, None if unknown.
        reason: One sentence with the numbers.
        distance: Largest relative distance of any part from its reference in fp64.
        allowed: The most that this part may have.
    """

    right: bool | None
    reason: str
    distance: float = 0.0
    allowed: float = 0.0

    @property
    def order(self) -> tuple[int, float]:
        """A key by which the finding that decides is the first: wrong, else unknown, else worst."""
        share = self.distance / self.allowed if self.allowed else 0.0
        return (1 if self.right is None else 2 * self.right), -share


@dataclass(frozen=True, slots=True)
class Compared:
    """One comparison in blocks of steps that take turns: of two sets of levers, or two settings.

    Attributes:
        levers: The levers that only one side has; empty for the noise floor, plain against plain;
            the name of the setting where two values of it are compared.
        asked: The value of the lever, such as ``default`` for compile; empty for several.
        verdict: What was found.
        ratio: Time of a step with them over that without.
        step_s: Median time of a step with them.
        plain_step_s: Median time of a step without.
        pairs: Pairs of blocks.
        steps: Steps taken for it, those not timed included.
        first_use_s: What the first steps with them took longer than others, such as compiling.
        parity: Whether the results are right; None where it doesn't matter any more.
        kept: Whether they are in the result.
        reason: Why, in one sentence.
        peak_bytes: Most device memory that was allocated with them, or most resident memory with a
            setting; 0 if unknown, as of a lever on a CPU.
        plain_peak_bytes: The same without.
        against: The value that the other side has of a setting; empty for levers.
        variable: ``NAME=VALUE`` or ``--option=VALUE``, by which a run has a setting; empty for
            levers.
    """

    levers: tuple[str, ...]
    asked: str
    verdict: Verdict
    ratio: Ratio
    step_s: float = 0.0
    plain_step_s: float = 0.0
    pairs: int = 0
    steps: int = 0
    first_use_s: float = 0.0
    parity: Parity | None = None
    kept: bool = False
    reason: str = ""
    peak_bytes: int = 0
    plain_peak_bytes: int = 0
    against: str = ""
    variable: str = ""

    @property
    def pays_after(self) -> int | None:
        """Steps after which a faster side has won back what its first use took; else None."""
        if self.verdict != "faster" or self.step_s >= self.plain_step_s:
            return None
        return math.ceil(self.first_use_s / (self.plain_step_s - self.step_s))


@dataclass(frozen=True, slots=True)
class TuningReport:
    """All that a run that tunes has found, rewritten after each comparison.

    Attributes:
        end: Why it ended; ``running`` while it does, and of a worker that was killed; ``children``
            where only processes that the script started made steps.
        steps: Optimizer steps so far, in all starts of the script.
        wall_s: Seconds from the worker's start, those of earlier starts included.
        noise: Plain against plain.
        compared: The levers, in the order in which they were compared.
        together: All that are kept against plain; None where the only one was compared so already.
        comparing: The levers that were being compared when this was written, or the script ended.
        starts: How often the script was started.
        epoch_steps: Steps of an epoch over the loader that feeds training; 0 if unknown.
        settings: Settings of the process, in the order in which they were compared.
        reading_s: Seconds of a step in which DataLoaders without workers read.
    """

    end: End
    steps: int
    wall_s: float
    noise: Compared | None = None
    compared: tuple[Compared, ...] = ()
    together: Compared | None = None
    comparing: tuple[str, ...] = ()
    starts: int = 1
    epoch_steps: float = 0.0
    settings: tuple[Compared, ...] = ()
    reading_s: float = 0.0

    @property
    def says_something(self) -> bool:
        """True if anything was found about any lever or setting."""
        compared = (*self.compared, *self.settings)
        return any(one.pairs or one.verdict != "undecided" for one in compared)

    @property
    def kept(self) -> tuple[str, ...]:
        """The levers that are faster and right."""
        return tuple(name for one in self.compared if one.kept for name in one.levers)

    @property
    def kept_settings(self) -> dict[str, Compared]:
        """The comparison that decided each setting that is kept, by its variable or option."""
        return {one.variable.partition("=")[0]: one for one in self.settings if one.kept}


@dataclass(frozen=True, slots=True)
class Timed:
    """The pairs of blocks of one comparison so far.

    Attributes:
        base: The levers of the side without.
        changed: The levers of the side with what is compared.
        wall: Ratios of wall times.
        processor: Ratios of processor times.
    """

    base: tuple[str, ...]
    changed: tuple[str, ...]
    wall: tuple[float, ...]
    processor: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TuningState:
    """What a script that ended early leaves to its next start.

    Attributes:
        report: The result so far.
        found: What the comparisons that are over have found, in their order.
        timed: The pairs of all comparisons.
        begun: What the comparison that isn't over has found; None if none had begun.
        spent_s: Seconds that it took.
    """

    report: TuningReport
    found: tuple[Compared, ...] = ()
    timed: tuple[Timed, ...] = ()
    begun: Compared | None = None
    spent_s: float = 0.0

    @property
    def progress(self) -> tuple[int, int]:
        """Comparisons that are over, and pairs of blocks; both only grow from start to start."""
        return len(self.found), sum(len(one.wall) for one in self.timed)


TUNED_FILE = "tuned.json"  # in the folder of runs


@dataclass(frozen=True, slots=True)
class TunedFor:
    """What a result of tuning holds for.

    Attributes:
        script: Absolute path of the script, or the name of the module.
        args: Its arguments, secrets masked.
        source: Digest of the script's own file; empty for a module.
        devices: The kind that was trained on, and the names of all devices, or of the processor.
        torch: Version of torch.
        fasttrain: Version of fasttrain.
        processes: Number of processes.
        strategy: What made them one run, such as ``ddp, batch split``; ``none`` for one process.
    """

    script: str
    args: tuple[str, ...]
    source: str
    devices: tuple[str, ...]
    torch: str
    fasttrain: str
    processes: int = 1
    strategy: str = "none"


@dataclass(frozen=True, slots=True)
class TunedVariable:
    """A setting of the process that later runs use.

    Attributes:
        name: Its variable, or its option.
        value: The value.
        against: What it was compared with, in words.
        ratio: Time of a step with it over that with the other.
        cores: Cores that were granted.
    """

    name: str
    value: str
    against: str
    ratio: Ratio
    cores: int


@dataclass(frozen=True, slots=True)
class Tuned:
    """A result of tuning that later runs use.

    Attributes:
        of: What it holds for.
        date: When it was found, such as ``2026-11-26``.
        options: Option and value of each lever that was decided.
        ratio: Time of a step with them over that without; None if nothing is faster.
        variables: Settings of the process that are kept.
    """

    of: TunedFor
    date: str
    options: dict[str, str]
    ratio: Ratio | None = None
    variables: tuple[TunedVariable, ...] = ()


@dataclass(frozen=True, slots=True)
class TunedResults:
    """The results in a folder of runs, the latest last."""

    results: tuple[Tuned, ...] = ()
