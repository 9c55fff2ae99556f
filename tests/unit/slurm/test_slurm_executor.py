"""The batch script as text; sending it is tried on the real cluster, in tests/slurm."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from fasttrain.model.job import JobParameters
from fasttrain.slurm.submission import Executor, batch_script, submit

WITH_TIME = """\
#!/bin/bash

# Parameters
#SBATCH --error=/runs/run/slurm/%j_0_log.err
#SBATCH --gpus-per-node=8
#SBATCH --job-name=train
#SBATCH --no-requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/runs/run/slurm/%j_0_log.out
#SBATCH --partition='a b'
#SBATCH --signal=USR1@120
#SBATCH --time=90
#SBATCH --wckey=submitit

# setup
export SUBMITIT_PREEMPT_SIGNAL=USR1
module load cuda
. '/my env/activate'

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /runs/run/slurm/%j_%t_log.out --error /runs/run/slurm/%j_%t_log.err\
 --kill-on-bad-exit=1 --mpi=none '/my env/python' -u -m fasttrain.slurm.node_start /runs/run/slurm
"""


def test_the_whole_script(make_draft: Any) -> None:
    job = make_draft(
        run={"nodes": "2"},
        gpus_per_node=8,
        partition="a b",
        time="1:30:00",
        signal="USR1@120",
        srun_args=("--mpi=none",),
        setup=("module load cuda", ". '/my env/activate'"),
        python="/my env/python",
    )
    assert batch_script(job) == WITH_TIME


def lines(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if word in line]


def test_without_a_time_limit_the_partitions_holds(make_draft: Any) -> None:
    assert lines(batch_script(make_draft()), "--time") == []


def test_without_an_interpreter_it_is_this_one(make_draft: Any) -> None:
    (command,) = lines(batch_script(make_draft()), "srun")
    assert f" {sys.executable} -u -m fasttrain.slurm.node_start" in command


@pytest.mark.parametrize(("parallel", "at_once"), [(None, 300), (3, 3), (400, 300)])
def test_an_array_has_the_cells_and_how_many_run_at_once(
    make_draft: Any, parallel: int | None, at_once: int
) -> None:
    script = batch_script(make_draft(sweep=("seed=0:300",), parallel=parallel))
    assert lines(script, "--array") == [f"#SBATCH --array=0-299%{at_once}"]
    assert lines(script, "--output=") == ["#SBATCH --output=/runs/run/slurm/%A_%a_0_log.out"]


class Silent(Executor):
    """Takes note of the environment instead of sending."""

    def submit_array(self, tasks: Any) -> list[Any]:  # type: ignore[override]
        return [dict(os.environ), *tasks]


def test_variables_are_added_and_left_out_for_sbatch_alone(
    make_draft: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "low")
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    parameters: JobParameters = make_draft(partition="main").parameters
    executor = Silent(tmp_path, parameters, anywhere=True)
    environ: Any = submit(executor, [], {"ADDED": "1"}, ["SBATCH_PARTITION", "SBATCH_WAIT"])[0]
    assert (environ["ADDED"], environ["SBATCH_ACCOUNT"]) == ("1", "mine")
    assert "SBATCH_PARTITION" not in environ
    assert (os.environ["SBATCH_PARTITION"], "ADDED" in os.environ) == ("low", False)
