"""What is asked of SLURM, compared as values; nothing is started."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fasttrain.model.decision import Setting, Source, SourceKind
from fasttrain.model.errors import FasttrainError
from fasttrain.model.job import Allocation, JobParameters, NodeShape
from fasttrain.model.settings import Settings, SlurmSettings
from fasttrain.planning.slurm_job import job_parameters, node_settings

SHAPE = NodeShape(cpus=40, gpus=8, nodes=4)


def said(table: Any, **values: Any) -> Any:
    source = {name: Source(SourceKind.FLAG, "--" + name.replace("_", "-")) for name in values}
    return replace(table, **{name: Setting(v, source[name]) for name, v in values.items()})


def parameters(shape: NodeShape | None = SHAPE, run: Any = None, **slurm: Any) -> JobParameters:
    settings = said(Settings(), nodes="2", **(run or {}))
    return job_parameters(settings, said(SlurmSettings(), **slurm), "train", shape)


def test_one_task_per_node_with_the_cpus_of_its_gpus() -> None:
    asked = parameters(gpus_per_node=4, time="1:30:00", partition="gpu", mem="64G")
    assert asked.submitit == {
        "job_name": "train",
        "nodes": 2,
        "ntasks_per_node": 1,
        "gpus_per_node": 4,
        "cpus_per_task": 20,
        "partition": "gpu",
        "mem": "64G",
        "time": 90,
        "signal_delay_s": 90,
        "additional_parameters": {"signal": "USR2@90", "no-requeue": True},
        "setup": ["export SUBMITIT_PREEMPT_SIGNAL=USR2"],
        "srun_args": ["--kill-on-bad-exit=1", "--cpus-per-task=20"],
    }


def test_one_task_per_gpu_is_the_classic_srun() -> None:
    # srun --gres=gpu:8 --ntasks=16 --ntasks-per-node=8 --cpus-per-task=5 --kill-on-bad-exit=1
    asked = parameters(gpus_per_node=8, tasks="per-gpu").submitit
    sizes = (asked["nodes"], asked["ntasks_per_node"], asked["gpus_per_node"])
    assert (*sizes, asked["cpus_per_task"]) == (2, 8, 8, 5)
    assert asked["srun_args"][0] == "--kill-on-bad-exit=1"


def test_values_stay_texts_where_slurm_takes_names() -> None:
    asked = parameters(account="007", job_name="42", mem="0").submitit
    assert (asked["account"], asked["job_name"], asked["mem"]) == ("007", "42", "0")


def test_without_a_limit_nothing_is_said_of_time() -> None:
    asked = parameters()
    assert asked.time_min is None
    assert "time" not in asked.submitit


def test_where_the_node_is_unknown_the_workers_would_share_a_cpu_and_it_is_told() -> None:
    asked = parameters(shape=None, gpus_per_node=8)
    assert "cpus_per_task" not in asked.submitit
    assert any("--cpus-per-task" in warning for warning in asked.warnings)
    assert parameters(shape=None, gpus_per_node=8, cpus_per_task=8).warnings == ()


def test_cpu_workers_get_one_cpu_each() -> None:
    assert parameters(shape=None, run={"nproc_per_node": 4}).submitit["cpus_per_task"] == 4


@pytest.mark.parametrize(
    ("requeue", "max_restarts", "word"),
    [(0, 0, "no-requeue"), (3, 0, "requeue"), (0, 1, "requeue")],
)
def test_slurm_may_queue_it_again_where_the_user_allows_it(
    requeue: int, max_restarts: int, word: str
) -> None:
    asked = parameters(run={"max_restarts": max_restarts}, requeue=requeue)
    extra = asked.submitit["additional_parameters"]
    assert extra[word] is True
    assert len({"requeue", "no-requeue"} & extra.keys()) == 1
    assert asked.requeue == requeue


def test_what_submitit_has_no_word_for_goes_to_sbatch_as_it_is() -> None:
    asked = parameters(reservation="course", sbatch=("core-spec=2", "overcommit="))
    extra = asked.submitit["additional_parameters"]
    assert (extra["reservation"], extra["core-spec"], extra["overcommit"]) == ("course", "2", True)
    assert "reservation" not in asked.submitit


def test_setup_and_srun_words_stand_behind_ours() -> None:
    asked = parameters(setup=("module load cuda",), srun_args=("--mpi=none",), signal="USR1@300")
    assert asked.submitit["setup"] == ["export SUBMITIT_PREEMPT_SIGNAL=USR1", "module load cuda"]
    assert asked.submitit["srun_args"][-1] == "--mpi=none"
    assert asked.submitit["additional_parameters"]["signal"] == "USR1@300"


def test_a_python_with_a_space_is_one_word_of_the_script() -> None:
    assert parameters(python="/my envs/bin/python").python == "'/my envs/bin/python'"


@pytest.mark.parametrize(("parallel", "told"), [(None, "1000"), (3, "3")])
def test_how_many_cells_of_a_sweep_go_on_at_once(parallel: int | None, told: str) -> None:
    asked = parameters(sweep=("lr=1,2",), **({"parallel": parallel} if parallel else {}))
    assert asked.submitit["array_parallelism"] == int(told)
    assert [row.value for row in asked.rows if row.name == "parallel"] == [told]
    assert not [row for row in parameters().rows if row.name == "parallel"]


def test_every_row_has_a_reason() -> None:
    rows = parameters(gpus_per_node=8, requeue=2, run={"max_restarts": 1}).rows
    assert all(row.reason and str(row.source) for row in rows)
    assert {"nodes", "time", "requeue", "max-restarts"} <= {row.name for row in rows}


@pytest.mark.parametrize(
    ("run", "slurm", "slug"),
    [
        ({"nodes": "1:4"}, {}, "slurm-nodes"),
        ({"nodes": "0"}, {}, "slurm-nodes"),
        ({"nodes": "5"}, {}, "slurm-nodes"),
        ({"gpus": "0,3"}, {}, "slurm-option"),
        ({"resume": "runs/a", "preempt": "snapshot"}, {}, "slurm-option"),
        ({"master_addr": "node1"}, {}, "slurm-option"),
        ({}, {"tasks": "per-gpu"}, "slurm-tasks"),
        ({}, {"job_name": "a\nb"}, "slurm-value"),
        ({}, {"comment": "back\\slash"}, "slurm-value"),
        ({}, {"partition": " "}, "slurm-value"),
        ({}, {"sbatch": ("output=x",)}, "slurm-sbatch"),
        ({}, {"sbatch": ("--ntasks_per_node=3",)}, "slurm-sbatch"),
        ({}, {"sbatch": ("licenses=a\nb",)}, "slurm-value"),
        ({}, {"signal": "KILL@10"}, "slurm-signal"),
        ({}, {"time": "soon"}, "slurm-time"),
    ],
)
def test_what_can_not_be_sent(run: Any, slurm: Any, slug: str) -> None:
    settings = said(said(Settings(), nodes="2"), **run)
    with pytest.raises(FasttrainError) as caught:
        job_parameters(settings, said(SlurmSettings(), **slurm), "train", SHAPE)
    assert caught.value.slug == slug


PLACE = Allocation("12", ("node1", "node2"), 1, 1, 0, 2, 8, 0)


def test_a_node_learns_its_rank_and_where_to_meet() -> None:
    slurm = said(SlurmSettings(), gpus_per_node=8)
    settings = node_settings(said(Settings(), nodes="2"), slurm, PLACE, 20123)
    assert (settings.nodes.value, settings.node_rank.value) == ("2", 1)
    assert (settings.master_addr.value, settings.master_port.value) == ("node1", 20123)
    assert (settings.gpus.value, str(settings.gpus.source)) == ("all", "--gpus-per-node")


def test_on_a_cpu_no_gpus_are_asked_for_and_one_node_meets_nobody() -> None:
    place = replace(PLACE, hosts=("node1",), node_rank=0, task=0, tasks=1)
    slurm = said(SlurmSettings(), gpus_per_node=8)
    settings = node_settings(said(Settings(), device="cpu"), slurm, place, 20123)
    assert (settings.gpus.value, settings.master_addr.value) == (None, None)
    assert settings.nodes.value == "1"
