"""What a job asks for, against clusters that are described here."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fasttrain.model.machine import Finding
from fasttrain.model.settings import Association, ClusterFacts, NodeKind, PartitionLimits
from fasttrain.slurm.check import check
from fasttrain.slurm.check_facts import Seen, ToolResult

MAIN = PartitionLimits("main", "UP", default=True, time_limit_min=600, nodes=12, max_nodes=8)
LONG = PartitionLimits("long", "UP", time_limit_min=6000, nodes=4)
FREE = PartitionLimits("free", "UP", nodes=2)
DOWN = PartitionLimits("down", "DOWN", nodes=2)
NODES = (
    NodeKind("main", "idle", 3, 64, 256_000, 8),
    NodeKind("main", "drained", 1, 64, 256_000, 8),
    NodeKind("main", "mixed", 8, 128, 512_000, 0),
    NodeKind("long", "idle", 4, 16, 64_000, 2),
    NodeKind("free", "idle", 2, 16, 64_000, 0),
    NodeKind("down", "idle", 2, 16, 64_000, 0),
)
CLUSTER = ClusterFacts(
    partitions=(MAIN, LONG, FREE, DOWN),
    nodes=NODES,
    associations=(Association("lab", "", ("normal", "high")), Association("guests", "", ("low",))),
    accounting=True,
    enforced=frozenset({"associations", "qos"}),
)

Judge = Callable[..., list[Finding]]


@pytest.fixture
def judged(make_draft: Any) -> Judge:
    """Return what is found in a job with these options."""

    def judge(
        cluster: ClusterFacts = CLUSTER,
        nodes: int = 1,
        environ: dict[str, str] | None = None,
        sent: ToolResult | None = None,
        **slurm: Any,
    ) -> list[Finding]:
        job = make_draft(run={"nodes": str(nodes)}, environ=environ, **slurm)
        return list(check(Seen(job, cluster, environ or {}, sent=sent or ToolResult())).findings)

    return judge


def told(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.severity) for finding in findings]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nodes": 8, "cpus_per_task": 64, "mem": "250G", "time": "10:00:00"},
        {"nodes": 3, "gpus_per_node": 8, "mem": "0"},
        {"partition": "long,main", "time": "4-0", "nodes": 8},
        {"partition": "free", "time": "400-0"},
        {"partition": "free,main", "time": "400-0"},
        {"account": "lab", "qos": "high"},
        {"qos": "low"},
    ],
)
def test_what_the_cluster_has_is_not_worth_a_word(judged: Judge, options: dict[str, Any]) -> None:
    assert judged(**options) == []


@pytest.mark.parametrize(
    ("options", "slug", "word"),
    [
        ({"partition": "nope"}, "slurm-partition", "main, long, free, down"),
        ({"partition": "main,nope"}, "slurm-partition", r"\bnope\b"),
        ({"partition": "down"}, "slurm-partition", r"\bdown\b.*\bDOWN\b"),
        ({"time": "601"}, "slurm-limit", "600 min"),
        ({"partition": "main,long", "time": "6001"}, "slurm-limit", "6000 min"),
        ({"nodes": 9}, "slurm-nodes", r"\b8\b"),
        ({"partition": "long", "nodes": 5}, "slurm-nodes", r"\b4\b"),
        ({"nodes": 5, "gpus_per_node": 1}, "slurm-nodes", r"\b4\b"),
        ({"gpus_per_node": 9}, "slurm-resources", r"\b8\b"),
        ({"partition": "free", "gpus_per_node": 1}, "slurm-resources", r"\b1 GPUs"),
        ({"cpus_per_task": 129}, "slurm-resources", r"\b128\b"),
        ({"tasks": "per-gpu", "gpus_per_node": 4, "cpus_per_task": 33}, "slurm-resources", "132"),
        ({"mem": "501G"}, "slurm-resources", r"\b512000\b"),
        ({"mem": "600000"}, "slurm-resources", "600000 MiB"),
        ({"gpus_per_node": 8, "mem": "300G"}, "slurm-resources", "8 GPUs.*307200 MiB"),
        ({"account": "nope"}, "slurm-account", "guests, lab"),
        ({"qos": "nope"}, "slurm-account", "high, low, normal"),
        ({"account": "guests", "qos": "high"}, "slurm-account", r"\blow$"),
    ],
)
def test_what_could_never_start(
    judged: Judge, options: dict[str, Any], slug: str, word: str
) -> None:
    (finding,) = judged(**options)
    assert told([finding]) == [(slug, "error")]
    assert re.search(word, f"{finding.what} {finding.why}")


# What ``sbatch --test-only`` of SLURM 22.05.8 says of both.
IMPOSSIBLE = ToolResult(
    "allocation failure: Requested node configuration is not available", "failed"
)


def test_sbatchs_refusal_is_told_where_no_check_tells_its_cause(judged: Judge) -> None:
    assert told(judged(sent=IMPOSSIBLE)) == [("slurm-resources", "error")]
    (finding,) = judged(gpus_per_node=9, sent=IMPOSSIBLE)
    assert "9 GPUs" in finding.what
    assert told(judged(nodes=4, gpus_per_node=8, sent=IMPOSSIBLE)) == [("slurm-nodes", "warning")]


def test_nodes_that_are_down_may_come_back(judged: Judge) -> None:
    (finding,) = judged(nodes=4, gpus_per_node=8)
    assert told([finding]) == [("slurm-nodes", "warning")]
    assert re.findall(r"\d+", finding.what) == ["4", "3", "4"], "fitting, up, asked for"


def test_nodes_in_two_partitions_are_counted_once(judged: Judge) -> None:
    twin = replace(MAIN, name="twin", default=False)
    nodes = (*NODES, *(replace(kind, partition="twin") for kind in NODES[:3]))
    cluster = replace(CLUSTER, partitions=(MAIN, twin), nodes=nodes)
    (finding,) = judged(cluster, partition="main,twin", nodes=5, gpus_per_node=8)
    assert re.findall(r"\d+", finding.why) == ["4"]


def test_a_partition_allows_no_more_nodes_than_it_has(judged: Judge) -> None:
    cluster = replace(CLUSTER, partitions=(replace(MAIN, max_nodes=100),))
    (finding,) = judged(cluster, nodes=13)
    assert re.findall(r"\d+", finding.why) == ["12"]


def test_a_qos_may_lift_the_time_limit(judged: Judge) -> None:
    assert told(judged(time="601", qos="high")) == [("slurm-limit", "warning")]


def test_sbatchs_own_variables_are_judged_too(judged: Judge) -> None:
    environ = {"SBATCH_PARTITION": "nope", "SBATCH_ACCOUNT": "other"}
    found = told(judged(environ=environ))
    assert ("slurm-partition", "error") in found
    assert ("slurm-account", "error") in found
    assert (
        told(judged(environ=environ, partition="main", account="lab"))
        == [("slurm-environment", "hint")] * 2
    )


def test_a_cluster_without_a_default_partition(judged: Judge) -> None:
    cluster = replace(CLUSTER, partitions=(LONG, FREE))
    assert told(judged(cluster)) == [("slurm-partition", "error")]
    assert judged(cluster, partition="free") == []


def test_a_user_without_accounts(judged: Judge) -> None:
    assert told(judged(replace(CLUSTER, associations=()))) == [("slurm-account", "error")]


@pytest.mark.parametrize("options", [{"account": "nope"}, {"qos": "nope"}])
def test_accounts_that_nobody_insists_on_are_hints(judged: Judge, options: dict[str, Any]) -> None:
    lax = replace(CLUSTER, enforced=frozenset())
    assert told(judged(lax, **options)) == [("slurm-account", "hint")]
    assert judged(replace(lax, associations=())) == []


def test_without_accounting_it_is_skipped_with_the_reason(judged: Judge) -> None:
    cluster = replace(CLUSTER, associations=None, accounting=False, enforced=frozenset())
    (finding,) = judged(cluster, account="lab")
    assert finding.severity == "hint"
    assert "--account" in finding.fix
    assert "--qos" in finding.fix
    assert judged(cluster) == []


def test_what_could_not_be_asked_is_told_and_nothing_is_made_of_it(judged: Judge) -> None:
    silent = ClusterFacts(unread=(("partitions", "scontrol gave no answer in 20 s"),))
    (finding,) = judged(silent, partition="main", nodes=99, gpus_per_node=99, time="99-0")
    assert told([finding]) == [("slurm-unread", "warning")]
    assert finding.why == "scontrol gave no answer in 20 s"
