"""The real ``fasttrain tune`` with two ranks: what it finds, and that it leaves no trace."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from fasttrain.model.places import scratch_folder
from fasttrain.model.tuning import TUNED_FILE

INJECTED = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(*(nn.Linear(24, 24) for _ in range(60)))
opt = torch.optim.Adam(net.parameters(), lr=1e-4)
for step in range(10**9):
    loss = net(torch.randn(8, 24)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 20 == 0:
        torch.save(net.state_dict(), "model.pt")
"""
# Each rank loads what rank 0 has saved, as where the best weights are put back.
OWN = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = DDP(nn.Sequential(*(nn.Linear(24, 24) for _ in range(60))))
opt = torch.optim.Adam(net.parameters(), lr=1e-4)
torch.manual_seed(rank)
for step in range(10**9):
    loss = net(torch.randn(8, 24)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 20 == 0:
        if rank == 0:
            torch.save(net.module.state_dict(), "model.pt")
        dist.barrier()
        net.module.load_state_dict(torch.load("model.pt"))
    RANK_1
"""
SCRIPTS = {"injected": INJECTED, "own": OWN.replace("RANK_1", "pass")}
TUNE = ("--nproc-per-node", "2", "--amp", "off", "--compile", "off", "--json")


def left(folder: Path) -> list[Path]:
    """Return all files of a folder but those of runs."""
    return [path for path in folder.rglob("*") if "fasttrain_runs" not in path.parts]


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Return the processes that have a run directory in their command line."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(run_dir) in word for word in process.info["cmdline"] or ())
    ]


@pytest.mark.parametrize("kind", SCRIPTS)
def test_two_ranks_compare_a_fused_optimizer(
    fasttrain: Any, script: Any, tmp_path: Path, kind: str
) -> None:
    path = script(SCRIPTS[kind])
    before = left(tmp_path)
    done = fasttrain("tune", path, *TUNE, "--budget", "80s", timeout_s=240)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["data"]
    assert report["end"] in ("decided", "budget")
    (one,) = report["compared"]
    assert one["levers"] == ["optimizer"]
    assert one["verdict"] in ("faster", "undecided"), "by how busy the machine is"
    assert one["parity"]["right"]
    assert one["pairs"]
    assert left(tmp_path) == before
    (run_dir,) = (plan.parent for plan in tmp_path.glob("fasttrain_runs/*/plan.json"))
    assert not scratch_folder(run_dir.name).exists()
    kept = tmp_path / "fasttrain_runs" / TUNED_FILE
    assert kept.exists() == one["kept"]
    if one["kept"]:
        (result,) = json.loads(kept.read_text())["results"]
        assert result["of"]["processes"] == 2


@pytest.mark.parametrize("whom", ["launcher", "rank", "ctrl-C"])
def test_an_end_from_outside_leaves_nothing_of_two_ranks(
    fasttrain: Any, script: Any, only_run_dir: Any, until: Any, tmp_path: Path, whom: str
) -> None:
    path = script(SCRIPTS["own"])
    before = left(tmp_path)
    process = fasttrain.start("tune", path, *TUNE, "--budget", "100s", stdout=subprocess.PIPE)
    until(lambda: [*tmp_path.glob("fasttrain_runs/*/tuning.json")])
    run_dir = only_run_dir()
    scratch = scratch_folder(run_dir.name)
    until(lambda: any(path.is_file() for path in scratch.rglob("model.pt")))
    assert len(processes_of(run_dir)) >= 3, "the agent and its ranks"
    if whom == "rank":
        heartbeat = json.loads((run_dir / "heartbeat-1.json").read_text())
        psutil.Process(heartbeat["pid"]).kill()
    else:
        process.send_signal(signal.SIGINT if whom == "ctrl-C" else signal.SIGKILL)
    process.communicate(timeout=240)
    until(lambda: not scratch.exists())
    until(lambda: not processes_of(run_dir))
    assert left(tmp_path) == before
    if whom == "rank":
        assert process.returncode == 137
    if whom == "ctrl-C":
        assert process.returncode == 130


@pytest.mark.parametrize(
    ("act", "code", "told"),
    [
        ("if rank and step == 30: break", 1, b"peer-lost"),
        ("if rank and step == 30: raise ValueError('mine')", 1, b"ValueError: mine"),
    ],
    ids=["ends early", "raises"],
)
def test_a_rank_that_leaves_the_others_ends_the_run(
    fasttrain: Any, script: Any, act: str, code: int, told: bytes
) -> None:
    path = script(OWN.replace("RANK_1", act))
    done = fasttrain("tune", path, *TUNE, "--budget", "80s", timeout_s=240)
    assert done.returncode == code
    assert told in done.stderr


def test_unrelated_ranks_are_refused(fasttrain: Any, script: Any) -> None:
    done = fasttrain("tune", script(INJECTED), *TUNE, "--strategy", "none")
    assert done.returncode == 78
    assert b"[tune-ranks]" in done.stderr
