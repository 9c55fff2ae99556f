"""What ``fasttrain tune`` asks of a worker, and what the worker has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TUNING_FILE = "tuning.json"  # in the run directory

UNBOUNDED = 1e9  # the upper end of a ratio of which nothing is known

Verdict = Literal["faster", "slower", "same", "undecided", "no effect", "wrong"]
End = Literal["running", "decided", "budget", "script"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a run that tunes is asked for.

    Attributes:
        budget_s: Seconds from the worker's start, after which nothing more is compared.
        scratch: Folder that takes what the script writes, removed after the run; empty if the
            script may write its files.
        keep: Folders in which writes are real, such as the run directory.
        seed: Seed of the order of blocks.
    """

    budget_s: float
    scratch: str
    keep: tuple[str, ...]
    seed: int = 0


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


@dataclass(frozen=True, slots=True)
class Compared:
    """One comparison of two sets of levers in blocks of steps that take turns.

    Attributes:
        levers: The levers that only one side has; empty for the noise floor, plain against plain.
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


@dataclass(frozen=True, slots=True)
class TuningReport:
    """All that a run that tunes has found, rewritten after each comparison.

    Attributes:
        end: Why it ended; ``running`` while it does, and of a worker that was killed.
        steps: Optimizer steps so far.
        wall_s: Seconds from the worker's start.
        noise: Plain against plain.
        compared: The levers, in the order in which they were compared.
        together: All that are kept against plain; None where the only one was compared so already.
        comparing: The levers that were being compared when this was written, or the script ended.
    """

    end: End
    steps: int
    wall_s: float
    noise: Compared | None = None
    compared: tuple[Compared, ...] = ()
    together: Compared | None = None
    comparing: tuple[str, ...] = ()

    @property
    def says_something(self) -> bool:
        """True if anything was found about any lever."""
        return any(one.pairs or one.verdict != "undecided" for one in self.compared)

    @property
    def kept(self) -> tuple[str, ...]:
        """The levers that are faster and right."""
        return tuple(name for one in self.compared if one.kept for name in one.levers)


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
    """

    script: str
    args: tuple[str, ...]
    source: str
    devices: tuple[str, ...]
    torch: str
    fasttrain: str


@dataclass(frozen=True, slots=True)
class Tuned:
    """A result of tuning that later runs use.

    Attributes:
        of: What it holds for.
        date: When it was found, such as ``2026-11-26``.
        options: Option and value of each lever that was decided.
        ratio: Time of a step with them over that without; None if nothing is faster.
    """

    of: TunedFor
    date: str
    options: dict[str, str]
    ratio: Ratio | None = None


@dataclass(frozen=True, slots=True)
class TunedResults:
    """The results in a folder of runs, the latest last."""

    results: tuple[Tuned, ...] = ()
