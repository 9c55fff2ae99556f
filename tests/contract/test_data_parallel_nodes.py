"""Nodes with networks of their own: an agent in each of two network namespaces of this machine.

Nothing but the link between them connects the two: neither sees the other's loopback.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.command import Command
from support.script_runs import LEVERS_OFF, Alone, assert_same_prints, differences, with_ranks
from support.thinned import thinned
from support.zygote import Zygote

HERE = Path(__file__).parent
LOADERS = HERE.parent / "scripts/loaders"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="making network namespaces takes root and iproute2",
    ),
]
WIRE = "wire0"
OWN_FILES = Path("/etc/netns")  # of the namespaces, by their names
NAMED = (
    "import os, socket, sys; socket.sethostname(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"
)
ADDRESSES = ("10.213.7.1", "10.213.7.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Any]]:
    """Return what runs fasttrain on each of two linked hosts, by the interface `WIRE`."""
    names = [f"ft{os.getpid()}-{at}" for at in (0, 1)]
    made = []
    before = OWN_FILES.exists()
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
            # `ip netns exec` puts it in the place of /etc/hosts.
            OWN_FILES.joinpath(name).mkdir(parents=True)
        ends = [["name", WIRE, "netns", name] for name in names]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        pairs = [*zip(ADDRESSES, names, strict=True)]
        known = "\n".join(["127.0.0.1 localhost", *map(" ".join, pairs)]) + "\n"
        for address, name in pairs:
            ip("-n", name, "addr", "add", f"{address}/24", "dev", WIRE)
            OWN_FILES.joinpath(name, "hosts").write_text(known)
            for device in ("lo", WIRE):
                ip("-n", name, "link", "set", device, "up")
        yield [host(name, tmp_path) for name in names]
    finally:
        for name in made:
            ip("netns", "del", name)
            shutil.rmtree(OWN_FILES / name, ignore_errors=True)
        if not before:
            OWN_FILES.rmdir()


def host(name: str, cwd: Path) -> Any:
    """Return the command ``fasttrain`` inside of a namespace."""
    command = Command(cwd)
    argv = command.argv
    inside = ["ip", "netns", "exec", name, "unshare", "--uts", sys.executable, "-c", NAMED, name]
    command.argv = lambda *words: [*inside, *argv(*words)]
    return command


def meeting(kind: str, node: int) -> tuple[str, ...]:
    if kind == "elastic":
        return ("--rdzv-endpoint", f"{ADDRESSES[0]}:29477", "--rdzv-id", "apart")
    where = ("--master-addr", ADDRESSES[0], "--master-port", "29477")
    return ("--node-rank", str(node), *where)


@pytest.mark.parametrize("kind", thinned(["elastic", "static"], 0))
def test_nodes_apart_train_what_one_process_trains(
    hosts: list[Any], tmp_path: Path, kind: str, zygote: Zygote
) -> None:
    path = LOADERS / "shuffled_classifier.py"

    def node(at: int) -> Any:
        options = (*LEVERS_OFF, "--nodes", "2", *meeting(kind, at))
        options += ("--show-ranks", "0")
        cwd = tmp_path / f"node-{at}"
        return with_ranks(hosts[at], cwd, path, ranks=2, options=options)

    with ThreadPoolExecutor(2) as pool:
        nodes = list(pool.map(node, range(2)))
    first, second = sorted(nodes, key=lambda run: not run.good.stdout)
    alone = Alone(zygote)(tmp_path / "alone", path)
    # torch warns of hosts that no name server knows.
    printed = [line for line in first.lines() if "[c10d]" not in line]
    assert_same_prints(
        printed, alone.good.stdout.splitlines(), lambda _: {"rel": 1e-4, "abs": 1e-4}
    )
    assert differences(first.saved(), alone.saved()) == []
    assert second.stdout == ""
    assert not (second.cwd / "model.pt").exists()
    (strategy, _) = first.outcomes("strategy")
    assert strategy["counts"]["ranks"] == 4
