"""Attempts of a run that is started again when it fails, and how its nodes agree on that.

Where there is an agent, it reports how its workers ended to the launcher of its node, by a pipe.
The launcher, which knows causes, answers with a verdict; the agent exchanges it with those of the
other nodes, and reports what all of them decide. Where that is another attempt, the launcher clears
the way: it ends what is left of the workers and puts their records aside. Then the agent starts
its workers again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fasttrain.model.crash import Crash, WorkerExits

NODE_LEFT, NODE_CAME = "a node left", "a node came"
RESTART_COUNT = "FASTTRAIN_RESTART_COUNT"
DIVIDER = "--- fasttrain: "  # starts the line between two attempts in a log


def restart_count(environ: Mapping[str, str]) -> int:
    """Return how often a run was started again; 0 where the variable is not a number of ours."""
    text = environ.get(RESTART_COUNT, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def attempt_folder(number: int) -> str:
    """Return the folder for the records of a failed attempt; attempts count from 1."""
    return f"attempt-{number}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the launcher of one node judges a failed attempt.

    Attributes:
        host: Name of the node.
        again: Whether another attempt can end better, as far as this node knows.
        reason: Why, or why not.
        delay_s: Seconds before another attempt.
        crash: The first failure on this node; None where nothing failed.
        of_a_peer: Whether that is what a rank reports of another one that it lost or waited for.
    """

    host: str
    again: bool
    reason: str
    delay_s: float = 0.0
    crash: Crash | None = None
    of_a_peer: bool = False


@dataclass(frozen=True, slots=True)
class Decided:
    """What all nodes of a run decide, each of them from the same verdicts.

    Attributes:
        again: Whether the run is started again.
        reason: Why, or why not.
        delay_s: Seconds before that.
        used: Restarts that were used, this one included.
        crash: The first failure of all nodes; None where none is known.
        elsewhere: Whether that was on another node than this one.
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
    """An attempt after which the run was started again.

    Attributes:
        number: Counted from 1.
        wall_s: Seconds that it took.
        reason: Why the run was started again.
        delay_s: Seconds before that.
        crash: Why it failed; None where it ended because a node came or left.
        folder: Where its records are kept, in the run directory.
    """

    number: int
    wall_s: float
    reason: str
    delay_s: float
    crash: Crash | None
    folder: str


class GivenUpError(Exception):
    """Another node's workers failed, and the run is not started again.

    Attributes:
        exit_code: What the first failure ended with.
    """

    def __init__(self, exit_code: int, why: str) -> None:
        super().__init__(why)
        self.exit_code = exit_code


def agree(
    verdicts: Sequence[Verdict], *, used: int, most: int, lost: int = 0, elastic: bool = False
) -> Decided:
    """Decide whether a failed run is started again; the same on every node, but for `elsewhere`.

    Args:
        verdicts: Those of the nodes, in the order of their ranks.
        used: Restarts that were used before.
        most: Restarts that were asked for.
        lost: Nodes that gave no verdict.
        elastic: Whether the run continues without them.
    """
    failed = [verdict for verdict in verdicts if verdict.crash]
    failed.sort(key=lambda one: (one.of_a_peer, one.crash.time_ns if one.crash else 0))
    first = failed[0] if failed else None
    crash = replace(first.crash, node=first.host) if first and first.crash else None
    refusing = next((one for one in (*failed, *verdicts) if not one.again), None)
    delay_s = max((one.delay_s for one in verdicts), default=0.0)
    left = bool(lost) and elastic and (first is None or first.of_a_peer)
    if refusing:
        final = refusing.reason
    elif lost and not elastic:
        final = "a node is gone that the run can't do without"
    elif not left and used >= most:
        final = f"all {most} restarts were used" if most > 1 else "its one restart was used"
    elif left:
        return Decided(again=True, reason=NODE_LEFT, delay_s=delay_s, used=used, crash=crash)
    else:
        reason = first.reason if first else ""
        return Decided(again=True, reason=reason, delay_s=delay_s, used=used + 1, crash=crash)
    return Decided(again=False, reason=final, used=used, crash=crash)
