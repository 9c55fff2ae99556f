"""Judges why a run failed: once, for the crash card, the restart and the receipt alike."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from fasttrain.files import write_private
from fasttrain.launch.crash.cause_rules import Cause, Facts
from fasttrain.launch.crash.causes import find_cause
from fasttrain.launch.crash.evidence import (
    Evidence,
    FailedRun,
    before_traceback,
    gather,
    last_lines,
    recent_traceback,
)
from fasttrain.model.codec import dumps
from fasttrain.model.crash import CRASH_FILE, Crash, Frame, Raised, stack_file
from fasttrain.model.secrets import secrets_of, without_secrets

# Which rank failed first, and what became of the others.


LOST = "lost the connection, a consequence"
WAS_STOPPED, WERE_STOPPED = "was stopped", "were stopped"
# torchrun's agent gives its workers more time than this between SIGTERM and SIGKILL.
SHORTEST_GRACE_NS = 1_000_000_000


class Standing(IntEnum):
    """Whether a failure can have been the first: the lowest standing is, then the earliest."""

    OWN = 0
    OF_A_PEER = 1  # it lost or waited for another rank
    STOPPED = 2  # by the agent, because another one had failed


@dataclass(frozen=True, slots=True)
class Judged:
    """One rank that ended badly, and the one judgement of its evidence.

    Attributes:
        evidence: What is known of its end.
        cause: Why it ended.
        facts: What the words of the cause are filled with.
        standing: Whether it can have been the first.
    """

    evidence: Evidence
    cause: Cause
    facts: Facts
    standing: Standing


def judge_ranks(gathered: Sequence[Evidence], *, several: bool) -> list[Judged]:
    """Return the ranks that ended badly, the first to fail first.

    Args:
        gathered: The evidence of each.
        several: Whether an agent started them, and stopped the others after the first end.
    """
    judged = in_order(_judge(one, gathered, several=several) for one in gathered)
    if judged[0].standing is not Standing.OF_A_PEER:
        return judged
    first, *others = judged
    late = late_failures(first, others)
    rest = (one for one in judged if one.evidence.rank not in late)
    again = (_judge(one, gathered, several=several) for one in late.values())
    return in_order((*rest, *again))


def _judge(evidence: Evidence, gathered: Sequence[Evidence], *, several: bool) -> Judged:
    cause, facts = find_cause(evidence)
    own = Standing.OWN
    return Judged(evidence, cause, facts, standing(evidence, cause, gathered) if several else own)


def standing(evidence: Evidence, cause: Cause, gathered: Iterable[Evidence]) -> Standing:
    """Return whether a failure can have been the first among all that ended badly.

    A rank that loses its peer often notices it before the peer's end is seen, so the cause counts
    more than the time. A rank that is stopped may end with an exit code or an exception of its own
    making; whichever rank ended first, those that stopped come after it.
    """
    first_exit_ns = min(one.exit.monotonic_ns for one in gathered)
    failure, code = evidence.failure, evidence.exit.exit_code
    if failure is None:
        # The agent sends SIGKILL to workers that ignore SIGTERM; one that comes at once is not its.
        late = evidence.exit.monotonic_ns - first_exit_ns > SHORTEST_GRACE_NS
        stopped = code == -signal.SIGTERM or (code == -signal.SIGKILL and late)
    else:
        bowed_out = failure.raised[0].name in ("SystemExit", "KeyboardInterrupt")
        stopped = bowed_out and failure.monotonic_ns > first_exit_ns
    if stopped:
        return Standing.STOPPED
    return Standing.OF_A_PEER if cause.of_a_peer else Standing.OWN


def in_order(judged: Iterable[Judged]) -> list[Judged]:
    """Return those that failed, the first one first."""
    return sorted(judged, key=lambda one: (one.standing, one.evidence.order_ns, one.evidence.rank))


def late_failures(first: Judged, others: Iterable[Judged]) -> dict[int, Evidence]:
    """Return the evidence of ranks that were stopped, but had failed before by their own logs.

    A rank that catches its error, leaves the process group and takes its time to end has its peers
    fail first. It records nothing when the agent stops it; its log may hold the traceback. A
    traceback that its peer's log holds as well is of something that both of them survived.

    Returns:
        By rank, the evidence with the traceback of the log as what ended it.
    """
    late = {}
    for one in others:
        if one.standing is not Standing.STOPPED or one.evidence.failure is not None:
            continue
        found = recent_traceback(one.evidence.log)
        if found and f"{found.kinds[0]}: {found.message}".rstrip(": ") not in first.evidence.log:
            ended = replace(one.evidence.exit, exit_code=1)
            late[one.evidence.rank] = replace(
                one.evidence, exit_code=1, raised=(found,), stack=(), exit=ended
            )
    return late


def told_of_others(first: Judged, others: Iterable[Judged]) -> str:
    """Return what became of those that also ended badly, in one sentence; empty without any."""
    stopped: list[int] = []
    consequences: list[int] = []
    parts = []
    for one in others:
        if one.standing is Standing.STOPPED:
            stopped.append(one.evidence.rank)
        elif one.standing is Standing.OF_A_PEER:
            consequences.append(one.evidence.rank)
        else:
            later_s = (one.evidence.order_ns - first.evidence.order_ns) / 1e9
            parts.append(failed_later(one.evidence.rank, later_s, one.cause.slug))
    if consequences:
        parts.append(f"{_ranks(consequences)} {LOST}")
    if stopped:
        parts.append(f"{_ranks(stopped)} {WERE_STOPPED if len(stopped) > 1 else WAS_STOPPED}")
    return "; ".join(parts)


def failed_later(rank: int, later_s: float, slug: str) -> str:
    """Return the words on a rank that failed by itself, after the first one."""
    return f"rank {rank} failed {later_s:.3g} s later: {slug}"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"{len(ranks)} other ranks"


def told_of_the_others(first: Judged, others: Sequence[Judged]) -> str:
    """Return what became of the others; where none failed by itself, with one's last log line.

    The rank that went away is then among those that were stopped, and nothing shows which it was.
    """
    told = told_of_others(first, others)
    if first.standing is not Standing.OF_A_PEER:
        return told
    stopped = (one.evidence for one in others if one.standing is Standing.STOPPED)
    said = (
        f"; the log of rank {one.rank} ends with: {line}"
        for one in stopped
        if (line := "".join(last_lines(one.log, 1))) and line not in first.evidence.log
    )
    return told + next(said, "")


# Judges why a run failed: once, for the crash card, the restart and the receipt alike.


AGENT_DIED = "torchrun's agent died of"
KEPT_FRAMES = 8
# Signals that nobody sends to stop a run: the agent takes SIGTERM and its like, and ends in order.
DEADLY = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
LINES, LINES_OF_SIGNAL = 3, 8  # a signal leaves no other words


def judge(run: FailedRun) -> tuple[Crash | None, tuple[str, ...]]:
    """Return why the run failed, and what could not be read; None where nothing failed.

    Writes crash.json, and removes the files for stacks that stayed empty.
    """
    run_dir = Path(run.plan.run_dir)
    _remove_empty_stacks(run_dir)
    if run.exit_code == 0:
        return None, ()
    gathered, problems = gather(run)
    if not gathered:
        return None, (*problems, *_lost_agent(run))  # an agent that ended by itself has said why
    crash = _crash(run, judge_ranks(gathered, several=run.by_agent))
    crash = without_secrets(Crash, crash, secrets_of(run.plan, run.environ))
    return crash, (*problems, *keep(run_dir, crash))


def keep(run_dir: Path, crash: Crash) -> tuple[str, ...]:
    """Write crash.json, and return what went wrong with that, if anything."""
    try:
        write_private(run_dir / CRASH_FILE, dumps(crash))
    except OSError as error:
        return (f"{CRASH_FILE} can't be written: {error.strerror}",)
    return ()


def _lost_agent(run: FailedRun) -> Iterator[str]:
    """Report an agent that died itself: it passes a worker's signal on only with its exit."""
    for signum in DEADLY:
        if run.exit_code == 128 + signum:
            yield f"{AGENT_DIED} {signum.name}, and its ranks were ended: see agent.log"


def _crash(run: FailedRun, judged: Sequence[Judged]) -> Crash:
    first, *others = judged
    evidence, facts, cause = first.evidence, first.facts, first.cause
    rank, code = evidence.rank, evidence.exit_code
    telling = evidence.telling()
    printed = before_traceback(evidence.log) if evidence.raised else evidence.log
    log_file = f"rank-{rank}.log"
    return Crash(
        rank=rank,
        ranks=run.plan.processes.value.nproc_per_node,
        exit_code=code if code >= 0 else 128 - code,
        signal=evidence.signal,
        time_ns=evidence.time_ns,
        cause=cause.slug,
        why=facts.fill(cause.why),
        fix=facts.fill(cause.fix),
        error=_error(telling.raised),
        frames=useful(telling.frames),
        log=last_lines(printed, LINES if evidence.raised else LINES_OF_SIGNAL),
        log_file=log_file if Path(run.plan.run_dir, log_file).exists() else "",
        shown=rank in run.shown,
        others=told_of_the_others(first, others),
        step=None if run.steps is None else run.steps.get(rank, 0),
    )


def _error(raised: tuple[Raised, ...]) -> str:
    if not raised:
        return ""
    kind, message = raised[0].kinds[0].removeprefix("builtins."), raised[0].message
    return f"{kind}: {message}" if message else kind


def useful(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """Return the user's own calls, and the innermost one whosever it is: what was called."""
    frames = list(frames)
    own = [frame for frame in frames[:-1] if frame.own] + frames[-1:]
    return tuple(own[-KEPT_FRAMES:])


def _remove_empty_stacks(run_dir: Path) -> None:
    for path in run_dir.glob(stack_file(0).replace("0", "*")):
        if path.is_file() and not path.stat().st_size:
            os.unlink(path)  # noqa: PTH108
