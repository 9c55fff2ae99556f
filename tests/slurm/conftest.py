"""A real SLURM cluster on this machine, for all tests of this folder.

How it is made, and what else it can do: tests/slurm_cluster/README.md.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import support.cluster

HERE = Path(__file__).parent
# No FASTTRAIN_ variable: fasttrain refuses those that it doesn't know.
REQUIRED = "REQUIRE_SLURM"
CLUSTERS = ("cluster", "cluster_without_accounting", "cluster_losing_nodes")


# These are left to be run by hand. What still meets their faults in .ci/run:
FULL = (
    "test_a_job_survives_its_node",  # test_a_dead_node_has_it_queued_again
    "test_down_leaves_nothing[ports]",  # the same with network namespaces
    "test_requeued_by_the_cluster_it_goes_on",  # preempted by another partition it goes on
    "test_the_ranks_of_all_nodes_are_told[per-node]",  # ranks of one node, and unit tests of hangs
    "test_the_ranks_of_all_nodes_are_told[per-gpu]",
    "test_the_warning_signal_has_it_saved_and_queued_again[USR1]",  # preempted, it gets it, too
    "test_the_warning_signal_has_it_saved_and_queued_again[USR2]",
    "test_a_script_without_checkpoints_goes_on_from_a_snapshot",  # contract/test_preempt_snapshots
    "test_a_time_limit_does_not_end_the_run",  # preempted by another partition
    "test_ranks_that_wait_for_another_node_do_not_hang",  # unit tests of hangs
    "test_a_template_is_one_data_parallel_run_over_two_nodes[per-node]",  # the same per GPU
    "test_submitits_own_view_agrees",  # nothing: submitit is asked in no other test
    "test_the_script_and_its_shape_may_come_from_the_file",  # unit tests of the configuration
    "test_without_accounting_a_job_that_vanished_is_told",  # unit tests of following a job
    "test_another_folder_finds_the_job_by_its_log",  # unit tests of jobs
    "test_modules_and_other_commands_run_too",  # unit tests of what a job runs
    "test_tools_that_hang_or_talk_rubbish_are_told[sleep 30]",  # unit tests of hardware/tool.py
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            if item.name in FULL:
                item.add_marker(pytest.mark.full)


def held(*options: str) -> Iterator[Any]:
    """Keep a cluster up, or skip where this machine can't hold one."""
    try:
        with support.cluster.held(*options) as cluster:
            yield cluster
    except support.cluster.UnavailableError as missing:
        if os.environ.get(REQUIRED):
            pytest.fail(f"{REQUIRED} is set, and {missing}", pytrace=False)
        pytest.skip(str(missing).strip())


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Two nodes with 8 pretended GPUs each, and sacct."""
    yield from held()


@pytest.fixture(scope="module")
def cluster_without_accounting() -> Iterator[Any]:
    """The same without sacct, as some sites have it."""
    yield from held("--accounting=no")


@pytest.fixture(scope="module")
def cluster_losing_nodes() -> Iterator[Any]:
    """The same with sacct, where a node that doesn't answer is down after 20 to 40 s."""
    yield from held("--slurmd-timeout=10")


@pytest.fixture(autouse=True)
def _leaves_cluster_idle(request: pytest.FixtureRequest, shared_folder: Path) -> Iterator[None]:
    """Leave no job and no stopped node to the next test.

    The folder is named here because it has to outlive the jobs: they would make it anew.
    """
    used = [request.getfixturevalue(name) for name in CLUSTERS if name in request.fixturenames]
    yield
    for each in used:
        each.settle()


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """Return an empty folder that the nodes see, with a short path."""
    with tempfile.TemporaryDirectory(prefix="share", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def fasttrain(cluster: Any, shared_folder: Path) -> Any:
    """Run the real fasttrain against the cluster."""
    return cluster.fasttrain(shared_folder)
