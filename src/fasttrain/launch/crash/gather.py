"""Gathers what the ranks left behind into the crash of a run, and keeps it in crash.json."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fasttrain.files.writing import write_private
from fasttrain.launch.crash.causes import find_cause
from fasttrain.launch.crash.evidence import Case
from fasttrain.launch.crash.first_failure import (
    STOPPING,
    Judged,
    Standing,
    fall,
    in_order,
    slow_ends,
    told_of_the_others,
)
from fasttrain.launch.crash.log_tail import (
    before_traceback,
    last_lines,
    last_traceback,
    read_stack,
    recent_traceback,
    tail,
)
from fasttrain.model.codec import CodecError, dumps
from fasttrain.model.crash import (
    CRASH_FILE,
    ENDS_FILE,
    Crash,
    End,
    Ends,
    Failure,
    Frame,
    Raised,
    Surroundings,
    failure_file,
    stack_file,
)
from fasttrain.model.plan import LaunchPlan
from fasttrain.model.reading import load
from fasttrain.model.secrets import hide, secrets_of, without_secrets

AGENT_DIED = "torchrun's agent died of"

KEPT_FRAMES = 8
# What nobody sends to have a run stopped: the agent takes SIGTERM and its like, and ends in order.
DEADLY = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
LINES, LINES_OF_SIGNAL = 3, 8  # a signal leaves no other words


@dataclass(frozen=True, slots=True)
class Scene:
    """What the launcher knows of a run that failed.

    Attributes:
        plan: The plan.
        masked: The same without secrets.
        environ: The environment as the user has it.
        exit_code: What the run ended with, or 128 + signal.
        before: The machine before the run.
        after: The machine behind it.
        shown: Ranks whose output was on the screen.
        rank: Rank of the only process of a run without an agent.
        steps: Optimizer steps of each rank; None where they can't be seen.
    """

    plan: LaunchPlan
    masked: LaunchPlan
    environ: Mapping[str, str]
    exit_code: int
    before: Surroundings
    after: Surroundings
    shown: Container[int]
    rank: int = 0
    steps: Mapping[int, int] | None = None


def investigate(scene: Scene) -> tuple[Crash | None, tuple[str, ...]]:
    """Return why the run failed, and what could not be read; None where nothing failed.

    Writes crash.json, and takes away the files for stacks that stayed empty.
    """
    run_dir = Path(scene.plan.run_dir)
    _sweep(run_dir)
    if scene.exit_code == 0:
        return None, ()
    problems: list[str] = []
    failures = _failures(run_dir, problems)
    ends = _ends(scene, failures, problems)
    if not ends:
        return None, (*problems, *_lost_agent(scene))  # one that ended by itself has told why
    first, *others = _judged(scene, ends, failures)
    if first.fallen.standing is Standing.OF_A_PEER:
        slow = slow_ends(first, others)
        first, *others = _judged(scene, ends, failures, slow)
    crash = _crash(scene, first, told_of_the_others(first, others))
    crash = without_secrets(Crash, crash, secrets_of(scene.plan, scene.environ))
    return crash, (*problems, *keep(run_dir, crash))


def _judged(
    scene: Scene, ends: tuple[End, ...], failures: Mapping[int, Failure], slow: Container[int] = ()
) -> list[Judged]:
    """Give all that ended badly, the first to fail first; `slow` failed by what their logs say."""
    ends = tuple(replace(end, exit_code=1) if end.rank in slow else end for end in ends)
    several = scene.plan.processes.value.backend == "torchrun"
    found = {}
    for end in ends:
        failure = failures.get(end.pid)
        case = _case(scene, end, failure, slow=end.rank in slow)
        cause, facts = find_cause(case)
        fallen = fall(end, failure, cause, ends, several=several)
        found[end.rank] = Judged(fallen, case, facts)
    return [found[one.end.rank] for one in in_order(one.fallen for one in found.values())]


def keep(run_dir: Path, crash: Crash) -> tuple[str, ...]:
    """Write crash.json, and give what went wrong with that, if anything."""
    try:
        write_private(run_dir / CRASH_FILE, dumps(crash))
    except OSError as error:
        return (f"{CRASH_FILE} can't be written: {error.strerror}",)
    return ()


def _failures(run_dir: Path, problems: list[str]) -> dict[int, Failure]:
    """Return what the workers recorded, by process: of an earlier attempt, none is asked for."""
    found = {}
    for path in sorted(run_dir.glob(failure_file(0).replace("0", "*"))):
        try:
            failure = load(Failure, path)
        except (OSError, CodecError) as error:
            problems.append(f"{path.name} can't be read: {error}")
            continue
        found[failure.pid] = failure
    return found


def _ends(scene: Scene, failures: Mapping[int, Failure], problems: list[str]) -> tuple[End, ...]:
    if scene.plan.processes.value.backend != "torchrun":
        failure = next(iter(failures.values()), None)
        pid = failure.pid if failure else 0
        # A shell, too, tells signal N as 128 + N; a script that records its exit tells the rest.
        signum = scene.exit_code - 128
        by_signal = signum in signal.valid_signals() and (failure is None or failure.exit_code < 0)
        code = -signum if by_signal else scene.exit_code
        return (End(scene.rank, pid, code, time.time_ns(), time.monotonic_ns()),)
    path = Path(scene.plan.run_dir, ENDS_FILE)
    try:
        return load(Ends, path).ends
    except FileNotFoundError:
        return ()  # stopped from outside, or the agent could not start anything
    except (OSError, CodecError) as error:
        problems.append(f"{path.name} can't be read: {error}")
        return ()


def _lost_agent(scene: Scene) -> Iterator[str]:
    """Tell of an agent that died itself: it passes a worker's signal on only with the ends."""
    for signum in DEADLY:
        if scene.exit_code == 128 + signum:
            yield f"{AGENT_DIED} {signum.name}, and its ranks were ended: see agent.log"


def _case(scene: Scene, end: End, failure: Failure | None, *, slow: bool) -> Case:
    run_dir = Path(scene.plan.run_dir)
    # Before any line of it is cut, and a secret with it.
    log = hide(tail(run_dir / f"rank-{end.rank}.log"), secrets_of(scene.plan, scene.environ))
    raised = failure.raised if failure else ()
    read = recent_traceback if slow else last_traceback
    if not failure and end.exit_code == 1 and (found := read(log)):
        raised = (found,)  # a command's, or of a worker that could not record it
    return Case(
        exit_code=_code(end, failure),
        raised=raised,
        cwd=failure.cwd if failure else "",
        log=log,
        stack=read_stack(run_dir / stack_file(end.rank)) if end.exit_code < 0 else (),
        plan=scene.masked,
        before=scene.before,
        after=scene.after,
        peak_bytes=_peak_bytes(),
    )


def _code(end: End, failure: Failure | None) -> int:
    """Return the exit code: of one that was stopped while it ended, what it would have been."""
    stopped = end.exit_code in STOPPING
    return failure.exit_code if failure and stopped else end.exit_code


def _peak_bytes() -> int:
    """Return the most memory that any process of the run had, once all have ended."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def _crash(scene: Scene, judged: Judged, others: str) -> Crash:
    first, case, facts = judged.fallen, judged.case, judged.facts
    rank, code = first.end.rank, case.exit_code
    telling = case.telling()
    said = before_traceback(case.log) if case.raised else case.log
    log_file = f"rank-{rank}.log"
    return Crash(
        rank=rank,
        ranks=scene.plan.processes.value.nproc_per_node,
        exit_code=code if code >= 0 else 128 - code,
        signal=case.signal,
        time_ns=first.time_ns,
        cause=first.cause.slug,
        why=first.cause.why.format_map(facts),
        fix=first.cause.fix.format_map(facts),
        error=_error(telling.raised),
        frames=useful(telling.frames),
        log=last_lines(said, LINES if case.raised else LINES_OF_SIGNAL),
        log_file=log_file if Path(scene.plan.run_dir, log_file).exists() else "",
        shown=rank in scene.shown,
        others=others,
        step=None if scene.steps is None else scene.steps.get(rank, 0),
    )


def _error(raised: tuple[Raised, ...]) -> str:
    if not raised:
        return ""
    kind, message = raised[0].kinds[0].removeprefix("builtins."), raised[0].message
    return f"{kind}: {message}" if message else kind


def useful(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """Give the user's own calls, and the innermost one whose ever it is: what was asked for."""
    frames = list(frames)
    own = [frame for frame in frames[:-1] if frame.own] + frames[-1:]
    return tuple(own[-KEPT_FRAMES:])


def _sweep(run_dir: Path) -> None:
    for path in run_dir.glob(stack_file(0).replace("0", "*")):
        if path.is_file() and not path.stat().st_size:
            os.unlink(path)  # noqa: PTH108
