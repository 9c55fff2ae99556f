"""Which of sbatch's variables hold beside what the user asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fasttrain.model.decision import Setting, Source, SourceKind
from fasttrain.model.job import JobParameters
from fasttrain.model.settings import Settings, SlurmSettings
from fasttrain.planning.slurm_job import job_parameters
from fasttrain.planning.slurm_values import contradicting, in_force, left_out


def parameters(kind: SourceKind = SourceKind.FLAG, **slurm: Any) -> JobParameters:
    source = Source(kind, "there")
    named = {name: Setting(value, source) for name, value in slurm.items()}
    return job_parameters(Settings(), SlurmSettings(**named), "train", None)


def names(found: Mapping[str, str]) -> set[str]:
    return set(found)


@pytest.mark.parametrize(
    ("asked", "variables"),
    [
        ({"partition": "main"}, {"SBATCH_PARTITION"}),
        ({"time": "10"}, {"SBATCH_TIMELIMIT"}),
        ({"mem": "1G"}, {"SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU"}),
        ({"gpus_per_node": 2}, {"SBATCH_GPUS_PER_NODE", "SBATCH_GPUS", "SBATCH_GPUS_PER_TASK"}),
        ({"exclusive": True}, {"SBATCH_EXCLUSIVE"}),
        ({"job_name": "x"}, {"SBATCH_JOB_NAME"}),
        ({"sbatch": ("--gres-flags=x", "switches=1")}, {"SBATCH_GRES_FLAGS", "SBATCH_REQ_SWITCH"}),
    ],
)
@pytest.mark.parametrize("kind", [SourceKind.FLAG, SourceKind.FILE, SourceKind.ENV])
def test_what_was_asked_for_beats_the_variable(
    kind: SourceKind, asked: dict[str, Any], variables: set[str]
) -> None:
    environ = dict.fromkeys(variables | {"SBATCH_ACCOUNT", "HOME"}, "x")
    assert names(left_out(parameters(kind, **asked), environ)) == variables
    assert names(in_force(parameters(kind, **asked), environ)) == {"SBATCH_ACCOUNT"}
    assert names(left_out(parameters(), environ)) == set()


def test_what_nobody_asked_for_stays_the_users_default() -> None:
    environ = {"SBATCH_PARTITION": "low", "SBATCH_JOB_NAME": "mine", "HOME": "/"}
    assert left_out(parameters(), environ) == {}
    assert in_force(parameters(), environ) == {
        "SBATCH_JOB_NAME": "mine", "SBATCH_PARTITION": "low",
    }  # fmt: skip


def test_what_a_run_rests_on_is_left_out_and_told() -> None:
    environ = {"SBATCH_SIGNAL": "USR1@3", "SBATCH_WAIT": "1", "SBATCH_TIMELIMIT": "5"}
    told = contradicting(parameters(time="10"), environ)
    assert names(told) == {"SBATCH_SIGNAL", "SBATCH_WAIT"}
    assert told["SBATCH_SIGNAL"] == "--signal"
