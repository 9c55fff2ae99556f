"""Gathers what is known of the end of each rank: its records, its log, and what ended it."""

from __future__ import annotations

import signal
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fasttrain.launch.crash.evidence import Evidence
from fasttrain.launch.crash.log_tail import last_traceback, read_stack, tail
from fasttrain.model.codec import CodecError
from fasttrain.model.crash import (
    Failure,
    Surroundings,
    WorkerExit,
    WorkerExits,
    failure_file,
    stack_file,
)
from fasttrain.model.plan import LaunchPlan
from fasttrain.model.reading import load
from fasttrain.model.secrets import hide, secrets_of
from fasttrain.processes.table import peak_of_children

# Signals by which the agent stops workers.
STOPPING = (-signal.SIGTERM, -signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class FailedRun:
    """What the launcher knows of a run that failed.

    Attributes:
        plan: The plan.
        masked: The same without secrets.
        environ: The environment as the user has it.
        exit_code: What the run ended with, or 128 + signal.
        before: The machine before the run.
        after: The machine after it.
        shown: Ranks whose output was on the screen.
        rank: Rank of the only process of a run without an agent.
        steps: Optimizer steps of each rank; None where they can't be seen.
        exits: What the agent reported of its workers that ended badly.
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
    exits: WorkerExits = field(default_factory=WorkerExits)

    @property
    def by_agent(self) -> bool:
        """True if an agent started the workers and reports their ends."""
        return self.plan.processes.value.backend == "torchrun"


def gather(run: FailedRun) -> tuple[tuple[Evidence, ...], tuple[str, ...]]:
    """Return the evidence of each rank that ended badly, and what could not be read.

    There is none where the run was stopped from outside, or the agent could not start anything.
    """
    failures, problems = _failures(Path(run.plan.run_dir))
    exits = run.exits.ends if run.by_agent else (_only_exit(run, failures),)
    return tuple(_evidence(run, one, failures.get(one.pid)) for one in exits), problems


def _failures(run_dir: Path) -> tuple[dict[int, Failure], tuple[str, ...]]:
    """Return what the workers recorded, by process number, and what could not be read.

    By process, because a record of an earlier attempt may be left; it has another process.
    """
    found, problems = {}, []
    for path in sorted(run_dir.glob(failure_file(0).replace("0", "*"))):
        try:
            failure = load(Failure, path)
        except (OSError, CodecError) as error:
            problems.append(f"{path.name} can't be read: {error}")
            continue
        found[failure.pid] = failure
    return found, tuple(problems)


def _only_exit(run: FailedRun, failures: Mapping[int, Failure]) -> WorkerExit:
    failure = next(iter(failures.values()), None)
    pid = failure.pid if failure else 0
    # A shell, too, reports signal N as 128 + N; only a script that records its exit shows which.
    signum = run.exit_code - 128
    by_signal = signum in signal.valid_signals() and (failure is None or failure.exit_code < 0)
    code = -signum if by_signal else run.exit_code
    return WorkerExit(run.rank, pid, code, time.time_ns(), time.monotonic_ns())


def _evidence(run: FailedRun, seen: WorkerExit, failure: Failure | None) -> Evidence:
    run_dir = Path(run.plan.run_dir)
    # Masked before any line is cut: half of a secret would no longer be recognised.
    log = hide(tail(run_dir / f"rank-{seen.rank}.log"), secrets_of(run.plan, run.environ))
    raised = failure.raised if failure else ()
    if not failure and seen.exit_code == 1 and (found := last_traceback(log)):
        raised = (found,)  # of a command, or of a worker that could not record it
    return Evidence(
        exit_code=_code(seen, failure),
        raised=raised,
        log=log,
        stack=read_stack(run_dir / stack_file(seen.rank)) if seen.exit_code < 0 else (),
        plan=run.masked,
        before=run.before,
        after=run.after,
        peak_bytes=max(peak_of_children(), run.exits.peak_bytes),
        exit=seen,
        failure=failure,
    )


def _code(seen: WorkerExit, failure: Failure | None) -> int:
    """Return the exit code; of a rank stopped while it was ending, what that would have been."""
    stopped = seen.exit_code in STOPPING
    return failure.exit_code if failure and stopped else seen.exit_code
