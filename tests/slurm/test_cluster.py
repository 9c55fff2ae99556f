"""The cluster itself: it does what tests of fasttrain on SLURM take for granted."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parent / "programs"
# Each task says when it listens, and ends by itself when it is told to.
LISTENING = r"""srun bash -c 'trap "echo got USR2; exit 0" USR2; echo listening
for i in {1..600}; do sleep 0.1; done; exit 9'"""
TWO_TASKS = ("--nodes=2", "--ntasks-per-node=1", "--signal=USR2@60", "--time=10")


def test_nodes_have_names_of_their_own(cluster: Any) -> None:
    out = cluster.run("srun", "--nodes=2", "hostname").stdout
    assert sorted(out.split()) == ["node1", "node2"]


def test_a_step_sees_all_gpus_of_its_nodes(cluster: Any) -> None:
    show = ("sh", "-c", "echo $SLURM_LOCALID:$CUDA_VISIBLE_DEVICES")
    options = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=8")
    out = cluster.run("srun", *options, *show).stdout
    assert sorted(out.split()) == [
        *["0:0,1,2,3,4,5,6,7"] * 2,
        *["1:0,1,2,3,4,5,6,7"] * 2,
    ]


def test_more_gpus_than_there_are_is_refused(cluster: Any) -> None:
    refused = cluster.run("sbatch", "--gpus-per-node=9", "--wrap=true", check=False)
    assert refused.returncode == 1
    assert "Requested node configuration is not available" in refused.stderr


def test_a_signal_to_the_job_reaches_its_tasks(cluster: Any) -> None:
    job = cluster.submit(LISTENING, *TWO_TASKS)
    cluster.wait_for_output(job, "listening", times=2)
    cluster.run("scancel", "--signal=USR2", job)
    cluster.wait_for_state(job, "COMPLETED")
    assert cluster.output(job).count("got USR2") == 2


def test_slurm_sends_the_signal_before_it_preempts(cluster: Any) -> None:
    job = cluster.submit(LISTENING, *TWO_TASKS, "--partition=low", "--exclusive")
    cluster.wait_for_output(job, "listening", times=2)
    cluster.submit("true", "--exclusive", "--nodes=2")
    cluster.wait_for_output(job, "got USR2", times=2)


def test_a_requeued_job_comes_back(cluster: Any) -> None:
    job = cluster.submit("echo run ${SLURM_RESTART_COUNT:-first}; sleep 60", "--requeue")
    cluster.wait_for_output(job, "run first")
    cluster.run("scontrol", "requeue", job)
    # sbatch takes the output of the run before away, unless it is told to append.
    assert cluster.wait_for_output(job, "run 1", timeout_s=240) == "run 1\n"
    assert cluster.job_field(job, "Restarts") == "1"


def test_sacct_knows_how_jobs_ended(cluster: Any) -> None:
    good, bad = cluster.submit("true"), cluster.submit("exit 3")
    long = cluster.submit("sleep 60")
    cluster.wait_for_state(long, "RUNNING")
    cluster.run("scancel", long)
    expected = {good: ["COMPLETED", "0:0"], bad: ["FAILED", "3:0"], long: ["CANCELLED by 0", "0:0"]}
    known: dict[str, list[str]] = {}

    def look() -> bool:
        for job in expected:
            (known[job],) = cluster.accounted(job, "State", "ExitCode") or [[]]
        return known == expected

    cluster.until(look, 20, lambda: f"{expected}: {known}")


def test_submitit_gives_results_in_the_order_of_ranks(cluster: Any, shared_folder: Path) -> None:
    program = PROGRAMS / "ranks_by_submitit.py"
    out = cluster.run(sys.executable, program, shared_folder, timeout_s=240).stdout
    assert out.splitlines() == [
        "[0, 'node1', 8]",
        "[1, 'node1', 8]",
        "[2, 'node2', 8]",
        "[3, 'node2', 8]",
    ]


def test_fasttrain_sees_the_cluster(fasttrain: Any) -> None:
    done = fasttrain("doctor", "--quick", "--json")
    assert b'"gpus_per_node": 8' in done.stdout


def test_without_accounting_sacct_says_so(cluster_without_accounting: Any) -> None:
    cluster = cluster_without_accounting
    refused = cluster.run("sacct", check=False)
    assert refused.returncode == 1
    assert "accounting storage is disabled" in refused.stderr
    job = cluster.submit("true")
    cluster.wait_for_state(job, "COMPLETED")


@pytest.mark.slow
def test_a_job_survives_its_node(cluster_losing_nodes: Any) -> None:
    cluster = cluster_losing_nodes
    script = "echo run ${SLURM_RESTART_COUNT:-first} on $(hostname); sleep 60"
    job = cluster.submit(script, "--requeue", "--open-mode=append")
    cluster.wait_for_output(job, "run first on node1")
    cluster.stop_node("node1")
    cluster.wait_for_state(job, "PENDING", timeout_s=240)
    assert cluster.node_state("node1") == "down*"
    cluster.wait_for_output(job, "run 1 on node2", timeout_s=240)
    rows = cluster.accounted(job, "State", "NodeList")
    assert rows[0] == ["NODE_FAIL", "node1"]
    cluster.start_node("node1")
    began = time.monotonic()
    assert cluster.run("srun", "--nodelist=node1", "hostname").stdout == "node1\n"
    assert time.monotonic() - began < 20
