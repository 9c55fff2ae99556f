"""Gathers what the ranks left behind into the crash of a run, and keeps it in crash.json."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fasttrain.launch.case import Case
from fasttrain.launch.cause_rules import Facts
from fasttrain.launch.causes import find_cause
from fasttrain.launch.first_failure import STOPPING, Fallen, fall, in_order, told_of_others
from fasttrain.launch.last_words import (
    before_traceback,
    last_lines,
    read_stack,
    read_traceback,
    tail,
)
from fasttrain.launch.run_dir import write_private
from fasttrain.spec.codec import CodecError, dumps, loads
from fasttrain.spec.crash import (
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
from fasttrain.spec.plan import LaunchPlan
from fasttrain.spec.secrets import hide, secret_values

KEPT_FRAMES = 8
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
    """

    plan: LaunchPlan
    masked: LaunchPlan
    environ: Mapping[str, str]
    exit_code: int
    before: Surroundings
    after: Surroundings
    shown: frozenset[int]
    rank: int = 0


def investigate(scene: Scene) -> tuple[Crash | None, tuple[str, ...]]:
    """Give why the run failed, and what could not be read; None where nothing failed.

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
        return None, tuple(problems)  # the agent itself ended, and has told why
    cases = {end.rank: _case(scene, end, failures.get(end.pid)) for end in ends}
    several = scene.plan.processes.value.backend == "torchrun"
    told = {rank: find_cause(case) for rank, case in cases.items()}
    first, *others = in_order(
        fall(end, failures.get(end.pid), told[end.rank][0], ends, several=several) for end in ends
    )
    case, (_, facts) = cases[first.end.rank], told[first.end.rank]
    crash = _crash(scene, first, case, facts, told_of_others(first, others))
    crash = _without_secrets(crash, scene)
    try:
        write_private(run_dir / CRASH_FILE, dumps(crash))
    except OSError as error:
        problems.append(f"{CRASH_FILE} can't be written: {error.strerror}")
    return crash, tuple(problems)


def _failures(run_dir: Path, problems: list[str]) -> dict[int, Failure]:
    """Give what the workers recorded, by process: of an earlier attempt, none is asked for."""
    found = {}
    for path in sorted(run_dir.glob(failure_file(0).replace("0", "*"))):
        try:
            failure = loads(Failure, path.read_bytes())
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
        by_signal = scene.exit_code > 128 and (failure is None or failure.exit_code < 0)
        code = 128 - scene.exit_code if by_signal else scene.exit_code
        return (End(scene.rank, pid, code, time.time_ns()),)
    path = Path(scene.plan.run_dir, ENDS_FILE)
    try:
        return loads(Ends, path.read_bytes()).ends
    except FileNotFoundError:
        return ()  # stopped from outside, or the agent could not start anything
    except (OSError, CodecError) as error:
        problems.append(f"{path.name} can't be read: {error}")
        return ()


def _case(scene: Scene, end: End, failure: Failure | None) -> Case:
    run_dir = Path(scene.plan.run_dir)
    log = tail(run_dir / f"rank-{end.rank}.log")
    raised = failure.raised if failure else ()
    if not failure and end.exit_code == 1 and (read := read_traceback(log)):
        raised = (read,)  # a command's, or of a worker that could not record it
    return Case(
        exit_code=_code(end, failure),
        raised=raised,
        log=log,
        stack=read_stack(run_dir / stack_file(end.rank)) if end.exit_code < 0 else (),
        plan=scene.masked,
        before=scene.before,
        after=scene.after,
        peak_bytes=_peak_bytes(),
    )


def _code(end: End, failure: Failure | None) -> int:
    """Give the exit code: of one that was stopped while it ended, what it would have been."""
    stopped = end.exit_code in STOPPING
    return failure.exit_code if failure and stopped else end.exit_code


def _peak_bytes() -> int:
    """Give the most memory that any process of the run had, once all have ended."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def _crash(scene: Scene, first: Fallen, case: Case, facts: Facts, others: str) -> Crash:
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


def _without_secrets(crash: Crash, scene: Scene) -> Crash:
    named = {v.name: v.value for v in scene.plan.environment if v.value is not None}
    values = secret_values({**scene.environ, **named}, scene.plan.target.args)

    def clean(text: str) -> str:
        return hide(text, values)

    return replace(
        crash,
        why=clean(crash.why),
        fix=clean(crash.fix),
        error=clean(crash.error),
        frames=tuple(replace(frame, source=clean(frame.source)) for frame in crash.frames),
        log=tuple(map(clean, crash.log)),
    )


def _sweep(run_dir: Path) -> None:
    for path in run_dir.glob(stack_file(0).replace("0", "*")):
        if not path.stat().st_size:
            os.unlink(path)  # noqa: PTH108
