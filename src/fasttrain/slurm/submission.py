"""From what the user wants to a job that SLURM has taken."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError

import fasttrain
from fasttrain.config.resolve import Resolved
from fasttrain.files.writing import write_private
from fasttrain.launch.run_dir.lock import make_run_dir
from fasttrain.launch.run_dir.paths import default_run_dir, new_run_id
from fasttrain.model.codec import dumps
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
from fasttrain.planning.slurm.environment import contradicting, left_out
from fasttrain.planning.slurm.job import job_parameters
from fasttrain.planning.slurm.values import check_folder
from fasttrain.slurm.executor import SBATCH_TIMEOUT_S, Executor, submit
from fasttrain.slurm.node_task import NodeTask
from fasttrain.slurm.refusals import no_slurm, refused
from fasttrain.slurm.secrets import masked
from fasttrain.slurm.sweep import cells


@dataclass(frozen=True, slots=True)
class Draft:
    """A job before it is sent.

    Attributes:
        requests: One run, or one for each cell of a sweep; secrets not yet masked.
        run_dir: Absolute directory of the whole.
        target: What is started, without what the cells add.
        parameters: What submitit is to ask SLURM for.
        warnings: What the user should know, one sentence each.
        left_out: Variables of this process that must not reach sbatch.
        secrets: Secrets that are known, so that none of them is written.
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
    """Return what would be sent; nothing is written.

    Args:
        wanted: What the user wants.
        target: What is to be started.
        facts: What its source says.
        shape: A node of the partition; None where unknown.
        environ: The environment from which it would be sent.

    Raises:
        FasttrainError: The request contradicts itself, or SLURM would garble it.
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
    return Draft(
        requests=cells(whole),
        run_dir=Path(run_dir),
        target=target,
        parameters=parameters,
        warnings=(*parameters.warnings, *overruled),
        left_out=tuple(left_out(parameters, environ)),
        secrets=secret_values(environ, target.args),
    )


def batch_script(job: Draft) -> str:
    """Return the batch script that sbatch would get; needs no SLURM."""
    return Executor(job.folder, job.parameters, anywhere=True).batch_script(len(job.requests))


def send(job: Draft) -> SubmittedJob:
    """Write the run directory and submit.

    Raises:
        FasttrainError: ``slurm-missing`` without SLURM, ``run-dir`` or ``run-dir-used``,
            ``slurm-refused`` and others of `refused` where sbatch says no.
    """
    executor = _executor(job)
    written = {str(job.run_dir), *(request.run_dir for request in job.requests)}
    secret: dict[str, str] = {}
    for request in (replace(job.requests[0], run_dir=str(job.run_dir)), *job.requests):
        shown, secret = masked(request, job.secrets)
        if request.run_dir in written:
            make_run_dir(request.run_dir, JOB_FILE, dumps(shown))
            written.discard(request.run_dir)
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
    """Take back what was written for a job that SLURM refused, and only that."""
    shutil.rmtree(job.folder, ignore_errors=True)
    for run_dir in (*(request.run_dir for request in job.requests), str(job.run_dir)):
        for name in (JOB_FILE, LOCK_FILE):
            Path(run_dir, name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the user's own directory, with other files in it
            Path(run_dir).rmdir()


def _executor(job: Draft) -> Executor:
    try:
        return Executor(job.folder, job.parameters)
    except RuntimeError as error:  # submitit's word for a missing srun
        raise no_slurm() from error


def _submitted(job: Draft, job_id: str) -> SubmittedJob:
    several = len(job.requests) > 1
    told = job.target if several else job.requests[0].target
    return SubmittedJob(
        job_id=job_id,
        run_id=job.run_dir.name if several else job.requests[0].run_id,
        run_dir=str(job.run_dir),
        command=shlex.join((told.name, *mask_args(told.args, job.secrets))),
        submitted_s=time.time(),
        nodes=job.parameters.nodes,
        cells=tuple(request.run_dir for request in job.requests) if several else (),
    )
