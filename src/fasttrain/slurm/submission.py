"""Draft a job, or a sweep of jobs, from the options, and send it to SLURM."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import shlex
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from submitit.core import core, utils
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor, SlurmJob, _make_sbatch_string

import fasttrain
from fasttrain.config.resolve import Resolved
from fasttrain.files import write_private
from fasttrain.launch.run_dir.lock import make_run_dir
from fasttrain.launch.run_dir.paths import default_run_dir, new_run_id
from fasttrain.model.codec import dumps
from fasttrain.model.decision import Setting
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.job import (
    JOB_FILE,
    SUBMITIT_FOLDER,
    SUBMITTED_FILE,
    JobParameters,
    JobRequest,
    NodeShape,
    SubmittedJob,
)
from fasttrain.model.places import LOCK_FILE
from fasttrain.model.plan import ScriptFacts, Target
from fasttrain.model.secrets import mask_args, secret_values
from fasttrain.planning.slurm_job import job_parameters
from fasttrain.planning.slurm_values import MOST_CELLS, check_folder, contradicting, left_out
from fasttrain.slurm.node_task import NodeTask, masked
from fasttrain.slurm.refusals import no_slurm, refused

# submitit's executor with our changes; every job is submitted through it.


SBATCH_TIMEOUT_S = 60


class Executor(SlurmExecutor):
    """A SlurmExecutor that limits the time of sbatch, and adds no default that nobody asked for.

    Source: submitit 1.5.4, ``slurm/slurm.py``, whose methods it overrides.

    Args:
        folder: submitit's folder in the run directory.
        parameters: Parameters of the job.
        anywhere: Whether SLURM may be missing, because only the batch script is wanted.
    """

    def __init__(self, folder: Path, parameters: JobParameters, *, anywhere: bool = False) -> None:
        self._anywhere = anywhere
        super().__init__(folder, max_num_timeout=parameters.requeue, python=parameters.python)
        self.update_parameters(**parameters.submitit)
        self._limited = parameters.time_min is not None

    def affinity(self) -> int:  # type: ignore[override]
        """Return submitit's score for this executor: 1 without SLURM, too, if it may be missing."""
        return 1 if self._anywhere else int(SlurmExecutor.affinity())

    @property
    def _submitit_command_str(self) -> str:
        words = ("-u", "-m", "fasttrain.slurm.node_start", shlex.quote(str(self.folder)))
        return " ".join((self.python, *words))

    def batch_script(self, cells: int = 1) -> str:
        """Return the batch script for sbatch; that of a job array if there are several cells."""
        with self._array(cells):
            return self._make_submission_file_text(self._submitit_command_str, "")

    def _make_submission_file_text(self, command: str, uid: str) -> str:  # noqa: ARG002
        # Without a limit of ours, submitit would write its own default of five minutes.
        limit = {} if self._limited else {"time": None}
        parameters: dict[str, Any] = self.parameters | limit
        return str(_make_sbatch_string(command=command, folder=self.folder, **parameters))

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        # A controller that doesn't answer would block sbatch, and so us, for ever.
        limit = ["timeout", "--kill-after=5", str(SBATCH_TIMEOUT_S)]
        return [*limit, "sbatch", str(submission_file_path)]

    def _internal_process_submissions(
        self, delayed_submissions: list[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        if len(delayed_submissions) == 1:
            return list(super()._internal_process_submissions(delayed_submissions))
        # For arrays, submitit makes a plain SlurmExecutor, which would lose the methods above.
        folder = utils.JobPaths.get_first_id_independent_folder(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        pickles = [folder / f"{uuid.uuid4().hex}.pkl" for _ in delayed_submissions]
        for delayed, pickle in zip(delayed_submissions, pickles, strict=True):
            delayed.set_timeout(self.parameters.get("time", 5), self.max_num_timeout)
            delayed.dump(pickle)
        with self._array(len(pickles)):
            first = self._submit_command(self._submitit_command_str)
        tasks = list(range(first.num_tasks))
        jobs: list[core.Job[Any]] = [
            SlurmJob(folder=self.folder, job_id=f"{first.job_id}_{index}", tasks=tasks)
            for index in range(len(pickles))
        ]
        for job, pickle in zip(jobs, pickles, strict=True):
            job.paths.move_temporary_file(pickle, "submitted_pickle")
        return jobs

    @contextmanager
    def _array(self, cells: int) -> Iterator[None]:
        if cells > 1:
            self.parameters["map_count"] = cells
        try:
            yield
        finally:
            self.parameters.pop("map_count", None)


def submit(
    executor: Executor,
    tasks: Sequence[Any],
    changes: Mapping[str, str],
    left_out: Iterable[str] = (),
) -> list[core.Job[Any]]:
    """Send one job, or one job array of several cells.

    Args:
        executor: The executor, with the parameters of the job.
        tasks: The callable of each cell.
        changes: Variables of the job besides those of this process.
        left_out: Variables of this process that neither sbatch nor the job gets.

    Raises:
        submitit.core.utils.FailedJobError: If sbatch refuses; the message contains its words.
        submitit.core.utils.FailedSubmissionError: If sbatch prints no job number.
    """
    # submitit prints sbatch's message, but our error repeats it, together with a fix.
    quiet = contextlib.redirect_stderr(io.StringIO())
    with _without(left_out), utils.environment_variables(**changes), quiet:
        return list(executor.submit_array(tasks))


@contextmanager
def _without(names: Iterable[str]) -> Iterator[None]:
    taken = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(taken)


# Draft a job, or a sweep of jobs, from the options, and send it to SLURM.


_RANGE = re.compile(r"(-?\d{1,9}):(-?\d{1,9})(?::(\d{1,9}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Draft:
    """A job before it is sent.

    Attributes:
        requests: One run, or one for each cell of a sweep; secrets are not masked yet.
        run_dir: Absolute run directory; for a sweep, that around the cells'.
        target: What is started, without the cells' options.
        parameters: Parameters of the job for submitit.
        warnings: What the user should know, one sentence each.
        left_out: Variables of this process that must not reach sbatch.
        secrets: Known secrets, which are masked in everything that is written.
    """

    requests: tuple[JobRequest, ...]
    run_dir: Path
    target: Target
    parameters: JobParameters
    warnings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    secrets: tuple[str, ...] = field(default=(), repr=False)

    @property
    def folder(self) -> Path:
        """Folder of the files of submitit and of SLURM."""
        return self.run_dir / SUBMITIT_FOLDER


def draft(
    wanted: Resolved,
    target: Target,
    facts: ScriptFacts,
    shape: NodeShape | None,
    environ: Mapping[str, str],
) -> Draft:
    """Return the job that would be sent; nothing is written.

    Args:
        wanted: The options.
        target: What to start.
        facts: Facts from the source of the script.
        shape: The nodes of the partition; None if unknown.
        environ: The environment from which the job would be sent.

    Raises:
        FasttrainError: If the request contradicts itself, or SLURM would garble it.
    """
    cwd = str(Path.cwd())
    run_id = new_run_id(target.name)
    named = wanted.settings.run_dir.value
    run_dir = str(Path(cwd, named)) if named else default_run_dir(cwd, run_id)
    check_folder(run_dir)
    name = Path(target.name).stem or "fasttrain"
    parameters = job_parameters(wanted.settings, wanted.slurm, name, shape)
    whole = JobRequest(
        run_id, run_dir, target, cwd, wanted.settings, wanted.slurm, facts, fasttrain.__version__
    )
    overruled = (
        f"{name} is left out of the job: {what} decides."
        for name, what in contradicting(parameters, environ).items()
    )
    requests = cells(whole)
    return Draft(
        requests=requests,
        run_dir=Path(run_dir),
        target=target,
        parameters=parameters,
        warnings=(*parameters.warnings, *overruled),
        left_out=tuple(left_out(parameters, environ)),
        secrets=_secrets(whole, requests, environ),
    )


def _secrets(
    whole: JobRequest, requests: Iterable[JobRequest], environ: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the secrets of the environment, of ``--env``, and of the arguments of all cells."""
    pairs = (entry.partition("=") for entry in whole.settings.env.value)
    named = {name: value for name, _, value in pairs}
    swept = {f"{name}={value}" for request in requests for name, value in request.cell.items()}
    return secret_values({**environ, **named}, (*swept, *whole.target.args))


def batch_script(job: Draft) -> str:
    """Return the batch script for sbatch; this works without SLURM."""
    return Executor(job.folder, job.parameters, anywhere=True).batch_script(len(job.requests))


def send(job: Draft) -> SubmittedJob:
    """Write the run directory and submit the job; return the job that SLURM accepted.

    Raises:
        FasttrainError: ``slurm-missing`` without SLURM; ``run-dir``, ``run-dir-used``;
            ``slurm-refused`` and other errors of `refused` if sbatch refuses.
    """
    executor = _executor(job)
    shown, secret = masked(job.requests, job.secrets)
    # The first one is for the directory around the cells of a sweep. A single run has no such
    # directory: both requests name the same one, which is written once.
    files = {str(job.run_dir): replace(shown[0], run_dir=str(job.run_dir))}
    for run_dir, request in (files | {request.run_dir: request for request in shown}).items():
        make_run_dir(run_dir, JOB_FILE, dumps(request))
    tasks = [NodeTask(request.run_dir) for request in job.requests]
    try:
        jobs = submit(executor, tasks, secret, job.left_out)
    except (FailedJobError, FailedSubmissionError) as error:
        _clear(job)
        raise refused(error, SBATCH_TIMEOUT_S) from error
    sent = _submitted(job, jobs[0].job_id.partition("_")[0])
    write_private(job.run_dir / SUBMITTED_FILE, dumps(sent))
    return sent


def _clear(job: Draft) -> None:
    """Remove the files that were written for a job that SLURM refused, and only those."""
    shutil.rmtree(job.folder, ignore_errors=True)
    for run_dir in (*(request.run_dir for request in job.requests), str(job.run_dir)):
        for name in (JOB_FILE, LOCK_FILE):
            Path(run_dir, name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the user's own directory, with other files in it
            Path(run_dir).rmdir()


def _executor(job: Draft) -> Executor:
    try:
        return Executor(job.folder, job.parameters)
    except RuntimeError as error:  # raised by submitit if srun is missing
        raise no_slurm() from error


def _submitted(job: Draft, job_id: str) -> SubmittedJob:
    several = len(job.requests) > 1
    target = job.target if several else job.requests[0].target
    return SubmittedJob(
        job_id=job_id,
        run_id=job.run_dir.name if several else job.requests[0].run_id,
        run_dir=str(job.run_dir),
        command=shlex.join((target.name, *mask_args(target.args, job.secrets))),
        submitted_s=time.time(),
        nodes=job.parameters.nodes,
        cells=tuple(request.run_dir for request in job.requests) if several else (),
    )


def cells(request: JobRequest) -> tuple[JobRequest, ...]:
    """Return one request per cell of a sweep; without a sweep, the request itself.

    The cells are the product of the options' values, of which the last varies fastest.

    Raises:
        FasttrainError: ``sweep`` for invalid values, or too many.
    """
    setting = request.slurm.sweep
    axes = [_axis(setting, text) for text in setting.value]
    if not axes:
        return (request,)
    combinations = list(itertools.islice(itertools.product(*axes), MOST_CELLS + 1))
    if len(combinations) > MOST_CELLS:
        raise _error(setting, "", f"it has more than {MOST_CELLS} cells", "sweep over fewer values")
    if len(combinations) == 1:
        return (_cell(request, "", dict(combinations[0])),)
    digits = len(str(len(combinations) - 1))
    return tuple(
        _cell(request, f"{index:0{digits}}", dict(combination))
        for index, combination in enumerate(combinations)
    )


def _cell(request: JobRequest, index: str, values: dict[str, str]) -> JobRequest:
    words = [word for name, value in values.items() for word in _words(name, value)]
    target = replace(request.target, args=(*request.target.args, *words))
    if not index:  # a single cell is a job like any other
        return replace(request, target=target, cell=values)
    run_id, run_dir = f"{request.run_id}_{index}", str(Path(request.run_dir, f"cell-{index}"))
    return replace(request, run_id=run_id, run_dir=run_dir, target=target, cell=values)


def _words(name: str, value: str) -> tuple[str, ...]:
    """Return an option in the script's syntax: ``--lr 0.1``, or ``model.lr=0.1`` for Hydra."""
    return (f"{name}={value}",) if "." in name or name[0] == "+" else (f"--{name}", value)


def _axis(setting: Setting[tuple[str, ...]], text: str) -> list[tuple[str, str]]:
    name, _, listed = text.removeprefix("--").partition("=")
    values = list(_values(listed))
    if not all(values) or not values:
        raise _error(setting, name, "a value is empty", f"write it like {name}=1e-3,1e-4")
    if len(set(values)) < len(values):
        raise _error(setting, name, "a value is repeated", "name each value once")
    return [(name, value) for value in values]


def _values(listed: str) -> Iterator[str]:
    for part in listed.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            yield part.strip()
            continue
        step = int(found[3] or 1) or 1
        numbers = range(int(found[1]), int(found[2]), step)
        yield from map(str, itertools.islice(numbers, MOST_CELLS + 1))


def _error(setting: Setting[tuple[str, ...]], name: str, why: str, fix: str) -> FasttrainError:
    return FasttrainError(
        f"{setting.source} {name} is not a valid sweep".replace("  ", " "),
        why=why,
        fix=f"{fix}; FROM:TO counts up to, and without, TO",
        slug="sweep",
        exit_code=ExitCode.USAGE,
    )
