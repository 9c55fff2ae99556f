"""Attempts of a run that restarts after a failure, and the messages that decide on a restart.

One exchange over the agent's pipe, on each node of a run that has an agent:

1. The agent reports how its workers ended.
2. The launcher, which knows the causes of failures, answers with its verdict.
3. The agent exchanges verdicts with the other nodes and reports the common decision.
4. If the run restarts, the launcher cleans up: it ends what is left of the workers and puts their
   records aside. Then it reports that, and the agent starts its workers again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fasttrain.model.crash import Crash, WorkerExits
from fasttrain.model.decision import Decision, Source, SourceKind
from fasttrain.model.settings import HangAction, NanChoice, PreemptChoice, RestartOn

# The watches over a run, its restarts, and what happens to it at preemption.


ResumeMode = Literal["no", "if-there", "required"]

# What rank 0 reports about snapshots, followed by a step or by nothing.
PREEMPTED_AFTER = "preempted after step"
GOING_ON = "going on from the snapshot of step"
NONE_YET = "there is no snapshot yet; the run starts from the beginning"


@dataclass(frozen=True, slots=True)
class HangWatch:
    """When a run counts as hung, and what happens then.

    Attributes:
        on: Whether the run is watched at all.
        timeout_s: Seconds without progress; None for a limit that follows the time of a step.
        action: Whether a hung run is stopped, or only reported.
    """

    on: bool
    timeout_s: int | None = None
    action: HangAction = "stop"


@dataclass(frozen=True, slots=True)
class Guards:
    """The watches over a training script, one decision each."""

    hang: Decision[HangWatch]
    nan: Decision[NanChoice]


@dataclass(frozen=True, slots=True)
class Restarts:
    """The restarts of a failed run.

    Attributes:
        most: Most restarts.
        on: ``auto``: restart after retryable failures; ``any``: after any failure.
        first_s: Seconds before the first restart.
        cap_s: Most seconds before a restart.
    """

    most: int = 0
    on: RestartOn = "auto"
    first_s: float = 2.0
    cap_s: float = 300.0

    def delay_s(self, barren: int) -> float:
        """Return the seconds before the next restart: exponential backoff up to `cap_s`.

        Args:
            barren: Attempts in a row, the last included, that failed without a training step.
        """
        return min(self.first_s * 2.0 ** min(max(barren - 1, 0), 32), self.cap_s)


@dataclass(frozen=True, slots=True)
class Preempt:
    """What happens at preemption, and the snapshots of a run.

    Attributes:
        mode: ``signal``: the script gets the signal; ``snapshot``: the run ends after a snapshot.
        signals: The signals that preempt a worker; the launcher sends the first.
        every_min: Minutes between snapshots without a signal; None for no such snapshots.
        resume: Whether the run resumes from a snapshot: ``no``; ``if-there``, for a requeued run;
            ``required``, if a person asked for it.
    """

    mode: PreemptChoice = "signal"
    signals: tuple[str, ...] = ("SIGUSR2",)
    every_min: int | None = None
    resume: ResumeMode = "no"


def left_to_the_script() -> Decision[Preempt]:
    """Return the decision for a run that takes no snapshots."""
    source = Source(SourceKind.DEFAULT, "default")
    return Decision(Preempt(), "signals reach the script, which saves what it needs", source)


NODE_LEFT, NODE_CAME = "a node left", "a node came"
NODE_MISSED = "a node is gone that the run can't do without"
RESTART_COUNT = "FASTTRAIN_RESTART_COUNT"
DIVIDER = "--- fasttrain: "  # starts the line between two attempts in a log


def restart_count(environ: Mapping[str, str]) -> int:
    """Return how often the run was restarted.

    Anything but a short number counts as 0: fasttrain didn't write it.
    """
    text = environ.get(RESTART_COUNT, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def attempt_folder(number: int) -> str:
    """Return the folder, in the run directory, for the records of a failed attempt.

    Attempts count from 1.
    """
    return f"attempt-{number}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of one node's launcher on a failed attempt.

    Attributes:
        host: Name of the node.
        again: Whether another attempt may succeed, as far as this node knows.
        reason: Why.
        delay_s: Seconds before another attempt.
        crash: The first failure on this node; None if nothing failed here.
        of_a_peer: Whether that failure only reports another rank as lost or late.
    """

    host: str
    again: bool
    reason: str
    delay_s: float = 0.0
    crash: Crash | None = None
    of_a_peer: bool = False


@dataclass(frozen=True, slots=True)
class Decided:
    """The common decision of all nodes; each derives it from the same verdicts.

    Attributes:
        again: Whether the run restarts.
        reason: Why, or why not.
        delay_s: Seconds before the restart.
        used: Restarts used so far, this one included.
        crash: The first failure on any node; None if none is known.
        elsewhere: Whether that failure was on another node than this one.
    """

    again: bool
    reason: str
    delay_s: float = 0.0
    used: int = 0
    crash: Crash | None = None
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """What the agent and the launcher of a node tell each other; one field is set.

    Attributes:
        exits: From the agent: how its workers ended.
        asks: Whether it waits for a verdict on that.
        verdict: From the launcher: its answer.
        decided: From the agent: what all nodes decided. It waits where the run is started again.
        cleared: From the launcher: the next attempt can begin.
    """

    exits: WorkerExits | None = None
    asks: bool = False
    verdict: Verdict | None = None
    decided: Decided | None = None
    cleared: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt after which the run restarted.

    Attributes:
        number: Counted from 1.
        wall_s: Seconds that it took.
        reason: Why the run restarted.
        delay_s: Seconds before the restart.
        crash: Why it failed; None if it ended because a node joined or left.
        folder: Folder of its records, in the run directory.
    """

    number: int
    wall_s: float
    reason: str
    delay_s: float
    crash: Crash | None
    folder: str


class GivenUpError(Exception):
    """Another node's workers failed, and the run does not restart.

    Attributes:
        exit_code: Exit code of the first failure.
    """

    def __init__(self, exit_code: int, why: str) -> None:
        super().__init__(why)
        self.exit_code = exit_code


def used_up(most: int) -> str:
    """Return the reason not to start again after this many restarts."""
    return f"all {most} restarts were used" if most > 1 else "its one restart was used"


def agree(
    verdicts: Sequence[Verdict], *, used: int, most: int, lost: int = 0, elastic: bool = False
) -> Decided:
    """Return the decision on a failed run; the same on every node, except for `elsewhere`.

    Args:
        verdicts: One per node, in the order of the node ranks.
        used: Restarts used before.
        most: Restarts allowed.
        lost: Number of nodes that sent no verdict.
        elastic: Whether the run can continue without those nodes.
    """
    failed = [verdict for verdict in verdicts if verdict.crash]
    # A lost connection is often reported before the death that caused it is seen, so a failure of a
    # rank's own comes before any report of a peer, whatever their times.
    failed.sort(key=lambda one: (one.of_a_peer, one.crash.time_ns if one.crash else 0))
    first = failed[0] if failed else None
    crash = replace(first.crash, node=first.host) if first and first.crash else None
    refusing = next((one for one in (*failed, *verdicts) if not one.again), None)
    delay_s = max((one.delay_s for one in verdicts), default=0.0)
    left = bool(lost) and elastic and (first is None or first.of_a_peer)
    if refusing:
        final = refusing.reason
    elif lost and not elastic:
        final = NODE_MISSED
    elif not left and used >= most:
        final = used_up(most)
    elif left:  # an elastic run goes on with fewer nodes, and that costs no restart
        return Decided(again=True, reason=NODE_LEFT, delay_s=delay_s, used=used, crash=crash)
    else:
        reason = first.reason if first else ""
        return Decided(again=True, reason=reason, delay_s=delay_s, used=used + 1, crash=crash)
    return Decided(again=False, reason=final, used=used, crash=crash)
