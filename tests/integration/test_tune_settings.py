"""Settings of the process under the real ``fasttrain tune``: what it keeps, and leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fasttrain.model.places import scratch_folder

# Slower with each thread, and where memory isn't kept, whatever else happens on the machine.
SLEEPS = """
import os
import time
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 4))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
truth = torch.randn(24, 4)
while True:
    x = torch.randn(32, 24)
    loss = nn.functional.cross_entropy(net(x), (x @ truth).argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    torch.save(net.state_dict(), "model.pt")
    time.sleep(0.03 * torch.get_num_threads() + 0.03 * ("GLIBC_TUNABLES" not in os.environ))
"""
# Reads as slowly as it computes, and each row takes its time.
READS = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
torch.manual_seed(0)
class Rows(Dataset):
    rows = torch.randn(4096, 24)
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        time.sleep(0.002)
        return self.rows[index], index % 4
class Net(nn.Sequential):
    def forward(self, x):
        time.sleep(0.004 * len(x))
        return super().forward(x)
net = Net(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 4))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
while True:
    for x, y in DataLoader(Rows(), 16, shuffle=True):
        loss = nn.functional.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
"""
NO_LEVERS = ("--compile", "off", "--optimizer", "keep", "--amp", "off")
ALONE = (*NO_LEVERS, "--loader-workers", "0", "--nproc-per-node", "1")


@pytest.fixture
def tune(fasttrain: Any) -> Any:
    """Return a function that starts a command on two cores, and leaves its threads to torch."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("the affinity mask has one core: there are no numbers of threads to compare")
    environ = {n: v for n, v in fasttrain.environ.items() if n != "OMP_NUM_THREADS"}
    return partial(
        fasttrain.start,
        env=environ,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def left(folder: Path) -> dict[str, bytes]:
    """Return all files of a folder but those of runs."""
    found = (path for path in folder.rglob("*") if "fasttrain_runs" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found if path.is_file()}


def no_scratch(run_dir: Path) -> bool:
    return not [*scratch_folder("x").parent.glob(f"fasttrain-{run_dir.name}*")]


def test_fewer_threads_and_an_allocator_are_kept_and_later_runs_have_them(
    tune: Any, script: Any, only_run_dir: Any, tmp_path: Path
) -> None:
    path = script(SLEEPS)
    before = left(tmp_path)
    process = tune("tune", path, *ALONE, "--budget", "100s", "--json")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    report = json.loads(out)["data"]
    one, other = report["settings"]
    assert (one["levers"], one["asked"], one["against"]) == (["threads"], "1", "2")
    assert other["levers"] == ["allocator"]
    for found in (one, other):
        assert (found["verdict"], found["kept"], found["parity"]["right"]) == ("faster", True, True)
        assert found["ratio"]["high"] < 1
        assert 1.5 > found["peak_bytes"] / found["plain_peak_bytes"] > 0.7
    assert left(tmp_path) == before
    run_dir = only_run_dir()
    assert json.loads((run_dir / "tuning.json").read_text()) == report
    assert no_scratch(run_dir)
    out, _ = tune("run", path, "--explain", "--json").communicate(timeout=240)
    rows = {row["topic"]: row for row in json.loads(out)["data"]}
    assert rows["OMP_NUM_THREADS"]["value"] == "1"
    assert rows["GLIBC_TUNABLES"]["value"].startswith("glibc.malloc.")
    for name in ("OMP_NUM_THREADS", "GLIBC_TUNABLES"):
        assert rows[name]["source"].startswith("tuned on ")


def test_a_worker_and_two_ranks_are_kept_and_later_runs_have_them(
    tune: Any, script: Any, tmp_path: Path
) -> None:
    path = script(READS)
    before = left(tmp_path)
    own = ("--env", "OMP_NUM_THREADS=1", "--env", "GLIBC_TUNABLES=glibc.malloc.arena_max=2")
    process = tune("tune", path, *NO_LEVERS, *own, "--budget", "180s", "--json")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    workers, ranks = json.loads(out)["data"]["settings"]
    assert (workers["levers"], workers["asked"]) == (["loader workers"], "1")
    assert (ranks["levers"], ranks["asked"], ranks["against"]) == (["ranks"], "2", "one process")
    for found in (workers, ranks):
        assert (found["verdict"], found["kept"], found["parity"]["right"]) == ("faster", True, True)
        assert found["ratio"]["high"] < 1
    assert left(tmp_path) == before
    process = tune("run", path, *own, "--max-steps", "5")
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    (path,) = tmp_path.glob("fasttrain_runs/*/receipt.json")
    receipt = json.loads(path.read_text())
    assert len(receipt["ranks"]) == 2
    found = {one["lever"]: one for one in receipt["ranks"][0]["outcomes"]}
    assert found["loader_workers"]["state"] == "applied"
    assert found["strategy"]["state"] == "applied"


@pytest.mark.parametrize("killed", [False, True], ids=["ctrl-C", "kill -9"])
def test_an_end_from_outside_leaves_nothing(
    tune: Any, script: Any, only_run_dir: Any, until: Any, tmp_path: Path, killed: bool
) -> None:
    path = script(SLEEPS)
    before = left(tmp_path)
    process = tune("tune", path, *ALONE, "--budget", "100s", "--json")
    until(lambda: [*tmp_path.glob("fasttrain_runs/*/tuning.json")])
    run_dir = only_run_dir()
    scratch = scratch_folder(f"{run_dir.name}-threads-1-chosen")
    until(lambda: any(path.is_file() for path in scratch.rglob("model.pt")))
    process.send_signal(signal.SIGKILL if killed else signal.SIGINT)
    out, _ = process.communicate(timeout=240)
    until(lambda: no_scratch(run_dir))
    assert left(tmp_path) == before
    assert not (tmp_path / "fasttrain_runs/tuned.json").exists()
    if not killed:
        assert process.returncode == 130
        assert json.loads(out)["data"]["settings"][0]["kept"] is False
