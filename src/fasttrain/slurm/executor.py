"""submitit's executor, with what it lacks for our jobs; nothing is submitted past it."""

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
    """Submits with a time limit of its own, and leaves out what nobody asked for.

    Source: submitit 1.5.4, ``slurm/slurm.py``, whose methods it overrides.

    Args:
        folder: submitit's folder in the run directory.
        parameters: What is sent.
        anywhere: Whether it is made where there is no SLURM, only to show the batch script.
    """

    def __init__(self, folder: Path, parameters: JobParameters, *, anywhere: bool = False) -> None:
        self._anywhere = anywhere
        super().__init__(folder, max_num_timeout=parameters.requeue, python=parameters.python)
        self.update_parameters(**parameters.submitit)
        self._limited = parameters.time_min is not None

    def affinity(self) -> int:  # type: ignore[override]
        """Say that there is a cluster where only the text is wanted."""
        return 1 if self._anywhere else int(SlurmExecutor.affinity())

    @property
    def _submitit_command_str(self) -> str:
        words = ("-u", "-m", "fasttrain.slurm.node_start", shlex.quote(str(self.folder)))
        return " ".join((self.python, *words))

    def batch_script(self, cells: int = 1) -> str:
        """Return the text that sbatch would get, of an array where there are several cells."""
        with self._array(cells):
            return self._make_submission_file_text(self._submitit_command_str, "")

    def _make_submission_file_text(self, command: str, uid: str) -> str:  # noqa: ARG002
        # Without a limit submitit writes its own default of five minutes.
        limit = {} if self._limited else {"time": None}
        parameters: dict[str, Any] = self.parameters | limit
        return str(_make_sbatch_string(command=command, folder=self.folder, **parameters))

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        # A controller that doesn't answer would hold sbatch, and so us, for ever.
        limit = ["timeout", "--kill-after=5", str(SBATCH_TIMEOUT_S)]
        return [*limit, "sbatch", str(submission_file_path)]

    def _internal_process_submissions(
        self, delayed_submissions: list[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        if len(delayed_submissions) == 1:
            return list(super()._internal_process_submissions(delayed_submissions))
        # submitit's own way with arrays makes a plain SlurmExecutor, which would lose the above.
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
    """Send one job, or one array of several cells.

    Args:
        executor: submitit's, with our parameters.
        tasks: What each cell calls.
        changes: Variables of the job beside those of this process.
        left_out: Variables of this process that neither sbatch nor the job gets.

    Raises:
        submitit.core.utils.FailedJobError: sbatch refused; the message holds its words.
        submitit.core.utils.FailedSubmissionError: sbatch said something else than a number.
    """
    # submitit prints what sbatch said; it is in the error as well, where its remedy stands too.
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
