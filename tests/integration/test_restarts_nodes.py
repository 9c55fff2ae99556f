"""Restarts of runs on two nodes, whose agents meet on loopback; nodes that leave and come."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fasttrain.launch.attempts import UNTRAINED
from fasttrain.model.attempts import NODE_CAME, NODE_LEFT, NODE_MISSED

# Each word of the command line is what becomes of one attempt of rank 1, behind one step.
TRAIN = """
import os, sys, time
import torch, torch.distributed as dist
again, rank = int(os.environ.get("FASTTRAIN_RESTART_COUNT", "0")), int(os.environ["RANK"])
dist.init_process_group("gloo")
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
if sys.argv[1 + again] == "lose":
    parameter.sum().backward()
    dist.all_reduce(parameter.grad)
    optimizer.step()
    if rank:
        raise ConnectionResetError("of rank 1")
    dist.barrier()
if sys.argv[1 + again] == "raise":
    print("attempt", again, flush=True)
    if rank:
        raise ValueError("of rank 1")
    time.sleep(600)  # it would never notice that rank 1 is gone
"""
# An injected run, whose script learns of its ranks past Python alone.
ELASTIC = """
import os, time, torch
from torch.utils.data import DataLoader, TensorDataset
again = os.environ.get("FASTTRAIN_RESTART_COUNT", "0")
started_with = dict(
    word.split("=", 1) for word in open("/proc/self/environ").read().split(chr(0)) if "=" in word
)
torch.manual_seed(0)
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(64, 2), torch.randn(64, 1)), batch_size=8)
steps = 0
while not os.path.exists(os.path.join(os.path.dirname(__file__), "stop")):
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()
        steps += 1
        if steps == 3:
            print("attempt", again, "has", started_with["WORLD_SIZE"], "ranks", flush=True)
        time.sleep(0.01)
"""
# One node dies while the other waits for it in the store, where no connection breaks.
WAITS = """
import os, time
import torch.distributed as dist
print("begun", flush=True)
if os.getcwd().endswith("node-1"):
    time.sleep(600)
dist.init_process_group("gloo")
"""
OPTIONS = ("--device", "cpu", "--preset", "exact", "--show-ranks", "all")


PATIENCE_S = 120  # two nodes start anew, one behind the other, on a machine that does more


def until(condition: Callable[[], object], *nodes: Node) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "\n".join(
            ["waited in vain", *(node.said() + node.told() for node in nodes)]
        )
        time.sleep(0.05)


class Node:
    """One node of a run: a launcher in a directory of its own."""

    def __init__(self, fasttrain: Any, cwd: Path, *words: Any) -> None:
        self.cwd = cwd
        cwd.mkdir(exist_ok=True)
        with (cwd / "stdout").open("ab") as out, (cwd / "stderr").open("ab") as err:
            self.process = fasttrain.start("run", *words, cwd=cwd, stdout=out, stderr=err)

    def told(self) -> str:
        return (self.cwd / "stderr").read_text(errors="replace")

    def said(self) -> str:
        return (self.cwd / "stdout").read_text(errors="replace")

    def end(self) -> int:
        return int(self.process.wait(PATIENCE_S))


@pytest.fixture
def node(fasttrain: Any, tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Start nodes, and end those that are left when a test fails."""
    started: list[Node] = []

    def start(at: int, *words: Any) -> Node:
        started.append(Node(fasttrain, tmp_path / f"node-{at}", *words))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGTERM)
            one.process.wait(120)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def newest(node: Node, name: str) -> Any:
    (run_dir,) = (node.cwd / "fasttrain_runs").glob("[!.]*/")
    return json.loads((run_dir / name).read_text())


@pytest.mark.slow
def test_two_nodes_start_again_and_give_up_together(script: Any, node: Any) -> None:
    where = ("--master-addr", "127.0.0.1", "--master-port", free_port(), "--max-restarts", "3")
    path = script(TRAIN)
    nodes = [
        node(at, path, "--nodes", "2", "--node-rank", at, *where, *OPTIONS, "lose", "raise")
        for at in (0, 1)
    ]
    assert [one.end() for one in nodes] == [1, 1], nodes[0].told()
    for one in nodes:
        assert "attempt 1" in one.said()
        assert re.search(r"\bnetwork: .*\b1 of 3\b.*\b2 s\b", one.told())
        crash = newest(one, "receipt.json")["crash"]
        assert (crash["rank"], crash["error"]) == (1, "ValueError: of rank 1")
        assert crash["final"] == UNTRAINED
        assert "[exception]" in one.told()
    assert newest(nodes[0], "crash.json")["node"] == socket.gethostname()
    assert newest(nodes[1], "crash.json")["node"] == ""


@pytest.mark.slow
def test_a_node_that_dies_ends_a_run_that_needs_it(script: Any, node: Any) -> None:
    """Its launcher is killed, and all that it ran with it; nobody waits for it to answer."""
    where = ("--master-addr", "127.0.0.1", "--master-port", free_port())
    path = script("import time\nprint('begun', flush=True)\ntime.sleep(600)")
    first, second = (
        node(at, path, "--nodes", "2", "--node-rank", at, *where, "--strategy", "none", *OPTIONS)
        for at in (0, 1)
    )
    until(lambda: "begun" in first.said() and "begun" in second.said())
    first.process.send_signal(signal.SIGKILL)  # it holds the store
    assert first.end() == -signal.SIGKILL
    assert second.end() == 1
    assert NODE_MISSED in second.told()


@pytest.mark.slow
def test_a_node_that_is_silent_ends_a_run_that_waits_for_it(script: Any, node: Any) -> None:
    """The other one holds the store, and its rank waits there: nothing breaks by itself."""
    port = free_port()
    options = ("--nodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "silent",
               "--rdzv-conf", "keep_alive_interval=1", "--strategy", "none", *OPTIONS)  # fmt: skip
    path = script(WAITS)
    first = node(0, path, *options)
    until(lambda: listens(port))
    second = node(1, path, *options)
    until(lambda: "begun" in first.said() and "begun" in second.said(), first, second)
    second.process.send_signal(signal.SIGKILL)
    assert second.end() == -signal.SIGKILL
    assert first.end() == 1
    assert NODE_MISSED in first.told()


@pytest.mark.slow
def test_a_node_leaves_and_one_comes(script: Any, node: Any, tmp_path: Path) -> None:
    path, port = script(ELASTIC), free_port()
    options = ("--nodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic",
               "--rdzv-conf", "last_call_timeout=3,keep_alive_interval=1",
               "--strategy", "ddp", *OPTIONS)  # fmt: skip
    first = node(0, path, *options)
    until(lambda: listens(port))
    second = node(1, path, *options)
    # Attempt 0, or 1 if the second was too late for the first.
    until(lambda: attempts_of(first, ranks=2), first, second)
    begun = max(attempts_of(first, ranks=2))
    second.process.send_signal(signal.SIGKILL)
    # The rendezvous may still count a node that has just been killed: that attempt fails, too.
    until(lambda: attempts_of(first, ranks=1) - set(range(begun)), first, second)
    alone = max(attempts_of(first, ranks=1))
    third = node(2, path, *options)
    until(
        lambda: (
            max(attempts_of(first, ranks=2)) > alone
            and max(attempts_of(first, ranks=2)) in attempts_of(third, ranks=2)
        )
    )
    (tmp_path / "stop").touch()
    assert [first.end(), third.end()] == [0, 0]
    assert second.end() == -signal.SIGKILL
    assert re.search(rf"\b{NODE_LEFT}\b.*\b2 s\b", first.told())
    assert NODE_CAME in first.told()
    reasons = [one["reason"] for one in newest(first, "receipt.json")["attempts"]][begun:]
    assert set(reasons[:-1]) == {NODE_LEFT}
    assert reasons[-1] == NODE_CAME


def attempts_of(node: Node, ranks: int) -> set[int]:
    """Return the attempts in which a node's workers saw so many ranks."""
    return {int(found) for found in re.findall(rf"attempt (\d+) has {ranks} ranks", node.said())}


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
