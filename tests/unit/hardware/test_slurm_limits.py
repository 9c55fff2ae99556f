"""What SLURM's tools say of a cluster, recorded on SLURM 22.05.8, and tools that misbehave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fasttrain.hardware.cluster import (
    find_limits,
    parse_associations,
    parse_nodes,
    parse_partitions,
)
from fasttrain.hardware.host import Host
from fasttrain.model.settings import Association, ClusterFacts, NodeKind, PartitionLimits

# Cut to a few fields; the limits of the second were set by hand.
PARTITIONS = """\
PartitionName=main AllowGroups=ALL Default=YES QoS=N/A DefaultTime=01:00:00 MaxNodes=UNLIMITED \
MaxTime=UNLIMITED MinNodes=0 Nodes=node[1-2] State=UP TotalCPUs=128 TotalNodes=2 JobDefaults=(null)
PartitionName=low AllowGroups=ALL Default=NO QoS=N/A DefaultTime=NONE MaxNodes=1 \
MaxTime=1-12:00:00 MinNodes=0 Nodes=node[1-2] State=DOWN TotalCPUs=128 TotalNodes=2
"""
NODES = "main|idle|2|64|512000|gpu:8\nlow|drained*|1|32+|256000+|gpu:a100:4(S:0-1)\n"
CONFIG = """\
Configuration data as of 2026-11-22T04:43:00
AccountingStorageEnforce = associations,limits,qos
AccountingStorageType   = accounting_storage/slurmdbd
"""
ASSOCIATIONS = "lab||normal,high\nguests|low|normal\n"
TOOLS = {"scontrol": "", "sinfo": NODES, "sacctmgr": ASSOCIATIONS}

Write = Callable[..., Host]


@pytest.fixture
def tools(tmp_path: Path) -> Write:
    """Put tools on PATH that print these texts, and give the machine that has them."""

    def write(config: str = CONFIG, **shells: str) -> Host:
        (tmp_path / "partitions").write_text(PARTITIONS)
        (tmp_path / "config").write_text(config)
        asked = f'case "$*" in *config) cat {tmp_path}/config;; *) cat {tmp_path}/partitions;; esac'
        for name, text in TOOLS.items():
            (tmp_path / f"{name}.txt").write_text(text)
            default = asked if name == "scontrol" else f"cat {tmp_path}/{name}.txt"
            path = tmp_path / name
            path.write_text(f"#!/bin/sh\n{shells.get(name, default)}\n")
            path.chmod(0o755)
        return Host({"PATH": f"{tmp_path}:/usr/bin:/bin"})

    return write


def unread(facts: ClusterFacts) -> dict[str, str]:
    return dict(facts.unread)


def test_partitions() -> None:
    assert list(parse_partitions(PARTITIONS)) == [
        PartitionLimits("main", "UP", default=True, nodes=2),
        PartitionLimits("low", "DOWN", time_limit_min=36 * 60, nodes=2, max_nodes=1),
    ]


def test_nodes() -> None:
    assert list(parse_nodes(NODES)) == [
        NodeKind("main", "idle", 2, 64, 512000, 8),
        NodeKind("low", "drained", 1, 32, 256000, 4),
    ]


def test_associations() -> None:
    assert list(parse_associations(ASSOCIATIONS)) == [
        Association("lab", "", ("normal", "high")),
        Association("guests", "low", ("normal",)),
    ]


def test_all_of_it(tools: Write) -> None:
    facts = find_limits(tools())
    assert facts.unread == ()
    assert [each.name for each in facts.partitions] == ["main", "low"]
    assert len(facts.nodes) == 2
    assert facts.associations is not None
    assert [each.account for each in facts.associations] == ["lab", "guests"]
    assert facts.accounting is True
    assert facts.enforced == {"associations", "limits", "qos"}


RUBBISH = ["echo", "printf 'slurm_load: warning\\n'", "printf '\\377\\000=\\n|||||\\n'", "exit 3"]
RUBBISH.append(f"echo 'a|b|{9:05000}|1|1|'; echo PartitionName=a State=UP TotalNodes={9:05000}")


@pytest.mark.parametrize("shell", RUBBISH)
def test_rubbish_is_unread_and_told(tools: Write, shell: str) -> None:
    facts = find_limits(tools(scontrol=shell, sinfo=shell))
    assert {"partitions", "nodes", "configuration"} >= set(unread(facts)) >= {"partitions", "nodes"}
    assert (facts.partitions, facts.nodes, facts.accounting) == ((), (), None)
    assert all(unread(facts).values())


def test_tools_that_hang_are_cut_off(tools: Write) -> None:
    hangs = "sleep 60"
    facts = find_limits(tools(scontrol=hangs, sinfo=hangs, sacctmgr=hangs), timeout_s=0.5)
    assert " 0.5 s" in unread(facts)["nodes"]


def test_all_tools_run_at_the_same_time(tools: Write, tmp_path: Path) -> None:
    waits = (
        f"touch {tmp_path}/begun-$$\n"
        f"until [ $(ls {tmp_path} | grep -c begun) = 4 ]; do sleep 0.01; done\n"
        f"touch {tmp_path}/met-$$"
    )
    find_limits(tools(scontrol=waits, sinfo=waits, sacctmgr=waits), timeout_s=40)
    assert len(list(tmp_path.glob("met-*"))) == 4


def test_without_accounting_nobody_is_asked_and_nothing_is_wrong(tools: Write) -> None:
    config = "AccountingStorageType = accounting_storage/none\n"
    facts = find_limits(tools(config, sacctmgr="echo rubbish; exit 1"))
    assert (facts.accounting, facts.associations, facts.unread) == (False, None, ())


def test_a_user_without_accounts_has_none(tools: Write) -> None:
    facts = find_limits(tools(sacctmgr="true"))
    assert (facts.associations, facts.unread) == ((), ())


def test_tools_that_are_not_there(tmp_path: Path) -> None:
    told = unread(find_limits(Host({"PATH": str(tmp_path)})))
    assert told["nodes"].startswith("sinfo ")
    assert told["nodes"].endswith(" PATH")
