"""What ``fasttrain run --prove`` asks of its workers, what they answer, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fasttrain.model.outcome import Outcome
from fasttrain.model.tuning import Ratio, Verdict

PROOF_FILE = "proof.json"  # in the run directory

Side = Literal["plain", "chosen", "control-1", "control-2", "control-3"]
End = Literal["running", "steps", "script", "failed", "given up", "interrupted"]
ALIKE = 3  # steps that a control trains as the plain run does, before it rounds
Finding = Literal["same bits", "within rounding", "differs", "can't tell"]


@dataclass(frozen=True, slots=True)
class Proof:
    """What a worker of a run that proves is asked for.

    Attributes:
        side: Which one it is: ``plain`` has no lever, ``chosen`` has those that were chosen, and
            the controls are plain ones whose results are rounded at random. Where settings of
            the process are compared, ``plain`` has the present one and ``chosen`` the other.
        descriptor: The end of the socket over which it gets its turns.
        address: Where several ranks fetch theirs; empty for one process, which inherits it.
        scratch: Folder that takes what the script writes, removed after the run; empty if the
            script may write its files.
        keep: Folders in which writes are real, such as the run directory.
        rounding: Largest relative error of a result of a control; 0 for the others.
        errors: Seed of a control's errors.
        seed: Seed of all that the script doesn't seed itself.
    """

    side: Side
    descriptor: int
    address: str = ""
    scratch: str = ""
    keep: tuple[str, ...] = ()
    rounding: float = 0.0
    errors: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """The steps that a worker may take now.

    Attributes:
        steps: How many.
        untimed: How many of them come before the timed ones.
        one_by_one: Whether each is timed alone, for which a device has to be waited for.
        over: Whether the script is to end instead.
    """

    steps: int
    untimed: int = 0
    one_by_one: bool = False
    over: bool = False


@dataclass(frozen=True, slots=True)
class Took:
    """What a worker did in its turn.

    Attributes:
        steps: Steps since it began.
        losses: The loss of each step of this turn; None where there was none, or it isn't finite.
        wall_s: Times of the timed steps, or of a device one for all.
        processor_s: The same by the processor's clock.
        turn_s: From the beginning of this turn to its end.
        ended: Whether the script has ended.
        passes: Backward passes in this turn.
        threads: Threads that torch computes one operation with; 0 if unknown.
        parted: How the steps of several ranks differ, as a sentence; empty if they don't.
        draws: Whether ranks that split a batch have drawn random numbers in calls of the model:
            each draws its own.
        threads_train: Whether several threads of the script made steps at the same time.
    """

    steps: int
    losses: tuple[float | None, ...] = ()
    wall_s: tuple[float, ...] = ()
    processor_s: tuple[float, ...] = ()
    turn_s: float = 0.0
    ended: bool = False
    passes: int = 0
    threads: int = 0
    parted: str = ""
    draws: bool = False
    threads_train: bool = False


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the curves.

    Attributes:
        first: Its first step, counted from 1.
        last: Its last step.
        plain: Mean loss of the plain run.
        chosen: Mean loss with the levers; None if one of them isn't finite.
        apart: Root mean square of their relative differences, step by step; None as well.
        allowed: What rounding explains; None without a control's curve.
    """

    first: int
    last: int
    plain: float
    chosen: float | None
    apart: float | None
    allowed: float | None


@dataclass(frozen=True, slots=True)
class Curves:
    """What two curves of losses say.

    Attributes:
        finding: Whether they are the same.
        reason: Why, in one sentence.
        windows: Their parts.
    """

    finding: Finding
    reason: str
    windows: tuple[Window, ...] = ()


@dataclass(frozen=True, slots=True)
class Speed:
    """How long steps take, from blocks that took turns.

    Attributes:
        verdict: Whether they are faster with the levers.
        ratio: Time of a step with them over that without.
        step_s: Median time of a step with them.
        plain_step_s: Median time of a step without.
        pairs: Pairs of blocks.
        begun_s: From the import of torch until steps take their usual time, with the levers.
        plain_begun_s: The same without.
        begun_steps: The steps until then.
        pays_after: Steps after which a run is faster in all; None if it never is, or isn't known.
    """

    verdict: Verdict
    ratio: Ratio
    step_s: float = 0.0
    plain_step_s: float = 0.0
    pairs: int = 0
    begun_s: float = 0.0
    plain_begun_s: float = 0.0
    begun_steps: int = 0
    pays_after: int | None = None


@dataclass(frozen=True, slots=True)
class ProofReport:
    """What a run that proves has found.

    Attributes:
        end: Why it ended.
        steps: Steps that were compared.
        wall_s: Seconds that it took.
        curves: What the losses say.
        speed: What the times say; None where none were taken.
        levers: What became of the chosen levers.
        losses: The loss of each step, by side.
        failed: What became of a side that failed, by side: one sentence.
        notes: What else there is to know, one sentence each.
    """

    end: End
    steps: int
    wall_s: float
    curves: Curves
    speed: Speed | None = None
    levers: tuple[Outcome, ...] = ()
    losses: dict[str, tuple[float | None, ...]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
