"""Judges why a run failed: once, for the crash card, the restart and the receipt alike."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fasttrain.files.writing import write_private
from fasttrain.launch.crash.first_failure import Judged, judge_ranks, told_of_the_others
from fasttrain.launch.crash.gather import FailedRun, gather
from fasttrain.launch.crash.log_tail import before_traceback, last_lines
from fasttrain.model.codec import dumps
from fasttrain.model.crash import CRASH_FILE, Crash, Frame, Raised, stack_file
from fasttrain.model.secrets import secrets_of, without_secrets

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
