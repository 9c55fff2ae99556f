"""SLURM as `sinfo` and a job's variables tell it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fasttrain.hardware.cluster import (
    FORMAT,
    find_cluster,
    gpus_of,
    job_gpus,
    parse_sinfo,
    time_limit_min,
)
from fasttrain.model.machine import Cluster, Partition

SINFO = """\
main*|up|2-00:00:00|3/4/1/8|gpu:h100:8(S:0-1)
main*|up|2-00:00:00|0/2/0/2|gpu:a100:4(S:0,2),shard:32
cpu|up|infinite|10/0/0/10|(null)
old|drain|30:00|0/5/0/5|gpu:2
"""
PARTITIONS = (
    Partition("main", nodes=10, nodes_up=9, gpus_per_node=8, time_limit_min=2880, default=True),
    Partition("cpu", nodes=10, nodes_up=10),
    Partition("old", nodes=5, nodes_up=0, gpus_per_node=2, time_limit_min=30),
)


def sinfo(answer: str) -> dict[str, str]:
    """Return a sinfo that knows its version and one format."""
    return {
        "sinfo": f'[ "$*" = --version ] && echo "slurm 24.11.3" && exit\n'
        f'[ "$*" = "-h -o {FORMAT}" ] || exit 64\n{answer}'
    }


def test_partitions_are_read(make_host: Any) -> None:
    assert find_cluster(make_host(tools=sinfo(f"echo '{SINFO}'"))) == Cluster("24.11.3", PARTITIONS)


def test_partitions_of_a_real_cluster_are_read() -> None:
    recorded = Path(__file__).parents[2] / "data/slurm/sinfo.txt"
    main = Partition("main", nodes=2, nodes_up=2, gpus_per_node=8, default=True)
    low = Partition("low", nodes=2, nodes_up=2, gpus_per_node=8)
    assert parse_sinfo(recorded.read_text()) == (main, low)


def test_no_slurm_is_an_empty_cluster(make_host: Any) -> None:
    assert find_cluster(make_host()) == Cluster()


def test_a_job_is_known_without_the_tools(make_host: Any) -> None:
    host = make_host(SLURM_JOB_ID="77", SLURM_JOB_GPUS="0,3")
    assert find_cluster(host) == Cluster(job="77", job_gpus=("0", "3"))


def test_gpus_without_a_job_are_a_leftover_variable(make_host: Any) -> None:
    assert find_cluster(make_host(SLURM_JOB_GPUS="0,3")) == Cluster()


@pytest.mark.parametrize(
    ("environ", "gpus"),
    [
        ({"SLURM_JOB_GPUS": "0,1", "SLURM_STEP_GPUS": "1"}, ("1",)),
        ({"SLURM_JOB_GPUS": "0,1", "SLURM_STEP_GPUS": ""}, ("0", "1")),
        ({"SLURM_JOB_GPUS": ""}, ()),
        ({}, ()),
    ],
)
def test_a_steps_gpus_come_before_its_jobs(environ: dict[str, str], gpus: tuple[str, ...]) -> None:
    assert job_gpus(environ) == gpus


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1",
            "Unable to contact slurm controller",
        ),
        ("echo 'PARTITION AVAIL TIMELIMIT'", "PARTITION AVAIL TIMELIMIT"),
        ("echo 'main*|up|soon|0/2/0/2|(null)'", "soon"),
        ("exec /bin/sleep 5", "0.3 s"),
    ],
)
def test_a_controller_that_does_not_answer_is_an_error(
    make_host: Any, answer: str, said: str
) -> None:
    cluster = find_cluster(make_host(tools=sinfo(answer)), timeout_s=0.3)
    assert (cluster.version, cluster.partitions) == ("24.11.3", ())
    assert said in cluster.error


NOT_SET_UP = """\
sinfo: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
sinfo: error: fetch_config: DNS SRV lookup failed
sinfo: error: _establish_config_source: failed to fetch config
sinfo: fatal: Could not establish a configuration source
"""


def test_tools_that_were_never_set_up_are_told_from_a_dead_controller(make_host: Any) -> None:
    tools = {"sinfo": f"echo '{NOT_SET_UP}' >&2; exit 1"}
    assert not find_cluster(make_host(tools=tools)).configured
    tools = {"sinfo": "echo 'Unable to contact slurm controller' >&2; exit 1"}
    assert find_cluster(make_host(tools=tools)).configured


def test_rubbish_is_cut_short(make_host: Any) -> None:
    with pytest.raises(ValueError, match=r"^sinfo .*x{80}$") as caught:
        parse_sinfo("x" * 5000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:8", 8),
        ("gpu:h100:8(S:0-1)", 8),
        ("gpu:a100:4(S:0,2),gpu:t4:2", 6),
        ("shard:32,gpu:2", 2),
        ("gpu:a100:no_consume:4", 4),
        ("npu:8", 0),
        ("mygpu:8", 0),
        ("(null)", 0),
        ("", 0),
    ],
)
def test_a_nodes_gpus_are_counted(gres: str, gpus: int) -> None:
    assert gpus_of(gres) == gpus


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("infinite", None),
        ("30:00", 30),
        ("2:00:00", 120),
        ("1-12:30:00", 36 * 60 + 30),
        ("7-00:00:00", 7 * 24 * 60),
    ],
)
def test_time_limits_are_minutes(text: str, minutes: int | None) -> None:
    assert time_limit_min(text) == minutes
