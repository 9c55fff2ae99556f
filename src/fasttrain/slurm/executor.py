"""submitit's executor with our changes; every job is submitted through it."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from submitit.core import core, utils
from submitit.slurm.slurm import SlurmExecutor, SlurmJob, _make_sbatch_string

from fasttrain.model.job import JobParameters

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
