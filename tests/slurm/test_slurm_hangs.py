"""A job hangs only where no rank of any node goes on, and is told with the stacks of all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fasttrain.model.codec import loads
from fasttrain.model.errors import ExitCode
from fasttrain.model.hang import Hang

FOUR_RANKS = (
    "--nodes", "2", "--gpus-per-node", "8", "--device", "cpu", "--time", "10", "--nproc-per-node",
    "2", "--strategy", "none", "--amp", "off", "--hang-timeout", "3", "--wait",
)  # fmt: skip
LOOP = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        model(torch.ones(4, 2)).sum().backward()
        sgd.step()
train(2)
if dist.get_rank() == 3:
    {rank_3}
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


@pytest.fixture
def run_dir(shared_folder: Path) -> Any:
    return lambda: next((shared_folder / "fasttrain_runs").glob("[!.]*/"))


@pytest.mark.parametrize("tasks", ["per-node", "per-gpu"])
def test_the_ranks_of_all_nodes_are_told(
    fasttrain: Any, shared_folder: Path, run_dir: Any, tasks: str
) -> None:
    (shared_folder / "train.py").write_text(LOOP.format(rank_3="time.sleep(100)"))
    done = fasttrain("slurm", "train.py", *FOUR_RANKS, "--tasks", tasks, timeout_s=240)
    assert done.returncode == ExitCode.HUNG, done.stderr.decode()
    hang = loads(Hang, (run_dir() / "hang.json").read_bytes())
    waits, sleeps = hang.verdict
    assert re.fullmatch(r"ranks 0-2 .*\ball_reduce\b.*\btrain\.py:13\b.*", waits)
    assert re.fullmatch(r"rank 3 .*\btrain\.py:12 in <module>: time\.sleep\(100\)", sleeps)
    assert [(rank.rank, rank.steps) for rank in hang.ranks] == [(n, 2) for n in range(4)]
    told = done.stderr.decode()
    assert waits in told
    assert "hang.json" in told, "the whole card"


def test_ranks_that_wait_for_another_node_do_not_hang(
    fasttrain: Any, shared_folder: Path, run_dir: Any
) -> None:
    works = "for _ in range(20):\n        time.sleep(0.4)\n        train(1)"
    (shared_folder / "train.py").write_text(LOOP.format(rank_3=works))
    done = fasttrain("slurm", "train.py", *FOUR_RANKS, timeout_s=240)
    assert done.returncode == 0, done.stderr.decode()
    assert not list(run_dir().rglob("hang.json"))
