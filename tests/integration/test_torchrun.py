"""Several ranks: what is shown, what is kept, and with which code a run ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

# Rank 1 fails on request; the others would then wait far longer than the test does.
ENDS = """
import os, signal, sys, time
rank, how = os.environ["RANK"], sys.argv[1]
print("line of", rank, flush=True)
print("error of", rank, file=sys.stderr, flush=True)
if how == "well":
    rank == "1" and print("tail", end="")
else:
    if rank == "1":
        how == "badly" and sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)
"""
GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: sum {total.item()}", flush=True)
dist.destroy_process_group()
"""
# Asks for its rank, and makes nothing of it.
ALONE = """
import os, torch
rank = os.environ.get("RANK")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4, 2)).sum().backward()
optimizer.step()
print("trained alone", flush=True)
"""
OF_RANK_1 = ["[rank 1] error of 1", "[rank 1] line of 1", "[rank 1] tail"]
TWO = ("--nproc-per-node", "2", "--device", "cpu")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("shown", "stdout"),
    [
        ((), ["line of 0"]),
        (("--show-ranks", "1"), OF_RANK_1),
        (("--show-ranks", "all"), [*OF_RANK_1, "line of 0"]),
    ],
    ids=["default", "1", "all"],
)
def test_shown_ranks_and_their_logs(
    fasttrain: Any, script: Any, only_run_dir: Any, shown: tuple[str, ...], stdout: list[str]
) -> None:
    done = fasttrain("run", script(ENDS), *TWO, *shown, "well")
    assert done.returncode == 0
    assert sorted(done.stdout.decode().splitlines()) == stdout
    for rank in "01":
        log = (only_run_dir() / f"rank-{rank}.log").read_text().splitlines()
        assert sorted(log)[:2] == [f"error of {rank}", f"line of {rank}"]


def test_two_gloo_runs_at_once(fasttrain: Any, script: Any) -> None:
    command = ("run", script(GLOO), *TWO, "--preset", "exact", "--show-ranks", "all")
    runs = [
        fasttrain.start(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for _ in range(2)
    ]
    for run in runs:
        said = run.communicate(timeout=240)[0].decode().splitlines()
        assert sorted(said) == ["[rank 1] rank 1 of 2: sum 3.0", "rank 0 of 2: sum 3.0"]
        assert run.returncode == 0


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [
        ("badly", 3, "rank 1 failed first, with exit code 3"),
        ("killed", 128 + signal.SIGKILL, "rank 1 failed first, with SIGKILL"),
    ],
)
def test_the_first_rank_that_fails_gives_the_exit_code(
    fasttrain: Any, script: Any, how: str, code: int, told: str
) -> None:
    done = fasttrain("run", script(ENDS), *TWO, how)
    assert done.returncode == code
    assert told in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


def test_unrelated_copies_are_refused(fasttrain: Any, script: Any) -> None:
    done = fasttrain("run", script(ALONE), *TWO)
    assert done.returncode == 78
    assert b"[unrelated-copies]" in done.stderr
    assert b"trained alone" not in done.stdout


def test_unrelated_copies_that_were_asked_for(fasttrain: Any, script: Any) -> None:
    done = fasttrain("run", script(ALONE), *TWO, "--strategy", "none", "--show-ranks", "all")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [b"[rank 1] trained alone", b"trained alone"]


@pytest.mark.parametrize("kind", ["static", "elastic"])
def test_two_nodes(fasttrain: Any, script: Any, tmp_path: Path, kind: str) -> None:
    path, port = script(ENDS), free_port()

    def node(rank: int) -> Any:
        meeting = {
            "static": ("--node-rank", rank, "--master-addr", "127.0.0.1", "--master-port", port),
            "elastic": ("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "together"),
        }[kind]
        return fasttrain("run", path, "--nodes", "2", *meeting, "--show-ranks", "all", "well")

    with ThreadPoolExecutor(2) as pool:
        nodes = list(pool.map(node, range(2)))
    assert [done.returncode for done in nodes] == [0, 0]
    lines = sorted(line.split(b"] ")[-1] for done in nodes for line in done.stdout.splitlines())
    # Where rank 0 is relayed, its stderr stays stderr.
    assert [line for line in lines if line.startswith(b"line")] == [b"line of 0", b"line of 1"]
    assert all(done.stdout.count(b"line of") == 1 for done in nodes)
    logs = sorted(tmp_path.glob("fasttrain_runs/*/rank-*.log"), key=lambda log: log.name)
    assert [log.read_text().count(f"line of {rank}") for rank, log in enumerate(logs)] == [1, 1]


COMPILES = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
for step in range(6):
    loss = net(torch.randn(16, 32)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_one_rank_of_a_node_compiles_and_the_other_loads(
    fasttrain: Any, script: Any, tmp_path: Path
) -> None:
    path = script(COMPILES)
    options = ("--compile", "default", "--nproc-per-node", "2")

    def compiled(threads: str) -> list[dict[str, Any]]:
        """Return the outcome of compile on both ranks, with a cache of the test's own."""
        run_dir = tmp_path / f"run-{threads}"
        environ = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": threads}
        done = fasttrain("run", path, *options, "--run-dir", run_dir, env=environ, timeout_s=240)
        assert done.returncode == 0, done.stderr
        reports = [json.loads((run_dir / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
        return [
            one for report in reports for one in report["outcomes"] if one["lever"] == "compile"
        ]

    first = compiled("1")
    assert [one["counts"]["graphs"] for one in first] == [1, 1]
    assert sorted(one["counts"].get("cached graphs", 0) for one in first) == [0, 1]
    assert not any("changed" in note for one in first for note in one["notes"])
    # Told by the rank that compiles, and by the other one if it looks at the same time.
    notes = [note for one in compiled("2") for note in one["notes"] if "changed" in note]
    assert set(notes) == {"compiled again, not from the cache: the number of threads changed"}
