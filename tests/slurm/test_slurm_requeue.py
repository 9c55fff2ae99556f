"""Jobs that end before their scripts do: time limits, preemption, dead nodes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain.model.attempts import GOING_ON
from fasttrain.slurm.follow import FORGOTTEN
from fasttrain.slurm.node_task import PUT_ASIDE

# Seeded, and saves nothing before its end: STEPS OUT SECONDS, of a batch.
TRAINS = """
import sys
import time

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
torch.set_num_threads(1)
steps, out = int(sys.argv[1]), sys.argv[2]
x = torch.randn(60, 4)
train = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=10, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
print("from 0", flush=True)
step = 0
while step < steps:
    for inputs, wanted in train:
        time.sleep(float(sys.argv[3]))
        optimizer.zero_grad()
        F.mse_loss(model(inputs), wanted).backward()
        optimizer.step()
        step += 1
        if step % 10 == 0:
            print("step", step, flush=True)
torch.save(model.state_dict(), out)
print("done", step)
"""
# Saves when the signal comes and goes on from there, as many scripts on clusters do.
RESUMES = """
import os, pathlib, signal, sys, time
state = pathlib.Path("state.txt")
step = int(state.read_text()) if state.exists() else 0
print("from", step, "restart", os.environ.get("FASTTRAIN_RESTART_COUNT", "0"), flush=True)
stop = []
signal.signal(getattr(signal, sys.argv[2]), lambda *_: stop.append(1))
while step < int(sys.argv[1]):
    time.sleep(0.1)
    step += 1
    if stop:
        state.write_text(str(step))
        sys.exit(0)
print("done", step)
"""
# Saves often, and knows nothing of signals.
SAVES = """
import pathlib, time
state = pathlib.Path("state.txt")
step = int(state.read_text()) if state.exists() else 0
print("from", step, flush=True)
while step < 60:
    time.sleep(0.1)
    step += 1
    state.write_text(str(step))
print("done", step)
"""


def run_dir(folder: Path) -> Path:
    (found,) = (folder / "fasttrain_runs").glob("[!.]*/")
    return found


def begin(fasttrain: Any, cluster: Any, folder: Path, text: str, *words: str) -> tuple[Any, str]:
    """Send a job, wait until its script has begun, and give the command and its number."""
    (folder / "train.py").write_text(text)
    waiting = fasttrain.start("slurm", "train.py", "--wait", *words, stderr=-1)
    cluster.until(lambda: "from 0" in log(folder), 40, lambda: log(folder))
    number: str = json.loads((run_dir(folder) / "submitted.json").read_text())["job_id"]
    return waiting, number


def log(folder: Path) -> str:
    found = list(folder.glob("fasttrain_runs/*/rank-0.log"))
    return found[0].read_text() if found else ""


@pytest.mark.parametrize("name", ["USR2", "USR1"])
def test_the_warning_signal_has_it_saved_and_queued_again(
    fasttrain: Any, cluster: Any, shared_folder: Path, name: str
) -> None:
    sent, number = begin(
        fasttrain, cluster, shared_folder, RESUMES, "--requeue", "1", "--signal", f"{name}@90",
        "--time", "20", "--", "40", f"SIG{name}",
    )  # fmt: skip
    cluster.run("scancel", "--signal", name, number)
    _, said = sent.communicate(timeout=240)
    assert sent.returncode == 0, said.decode()
    first, second = log(shared_folder).strip().splitlines()[0::2][0], log(shared_folder)
    assert first == "from 0 restart 0"
    assert second.endswith("done 40\n")
    assert " restart 1" in second
    assert cluster.job_field(number, "Restarts") == "1"
    (run_dir,) = shared_folder.glob("fasttrain_runs/[!.]*/")
    for attempt in (run_dir, run_dir / "attempt-1"):  # what each has told stays apart
        assert (attempt / "plan.json").exists()
    assert f"{PUT_ASIDE} attempt-1\n" in "".join(
        path.read_text() for path in run_dir.glob("slurm/*_log.err")
    )


def test_a_script_without_checkpoints_goes_on_from_a_snapshot(
    fasttrain: Any, cluster: Any, shared_folder: Path
) -> None:
    options = ("--device", "cpu", "--amp", "off", "--preempt", "snapshot")
    sent, number = begin(
        fasttrain, cluster, shared_folder, TRAINS, "--nodes", "2", "--requeue", "1",
        "--time", "20", *options, "--", "60", "parts.pt", "0.2",
    )  # fmt: skip
    cluster.until(lambda: "step 20" in log(shared_folder), 60, lambda: log(shared_folder))
    cluster.run("scancel", "--signal", "USR2", number)
    _, said = sent.communicate(timeout=240)
    assert sent.returncode == 0, said.decode()
    assert cluster.job_field(number, "Restarts") == "1"

    alone = ("--nproc-per-node", "2", "--run-dir", "whole")
    whole = fasttrain("run", "train.py", *options, *alone, "--", "60", "whole.pt", "0")
    assert whole.returncode == 0, whole.stderr.decode()
    # What the attempts printed is what one run prints; the log holds what torch says as well.
    lines = [
        line for line in log(shared_folder).splitlines() if line[:4] in {"from", "step", "done"}
    ]
    assert lines == whole.stdout.decode().splitlines()
    assert GOING_ON in log(shared_folder)
    parts, once = (torch.load(shared_folder / f"{name}.pt") for name in ("parts", "whole"))
    assert parts.keys() == once.keys()
    assert all(torch.equal(parts[name], once[name]) for name in once)


def test_it_is_queued_again_no_more_often_than_was_asked_for(
    fasttrain: Any, cluster: Any, shared_folder: Path
) -> None:
    sent, number = begin(
        fasttrain, cluster, shared_folder, RESUMES, "--signal", "USR2@90", "--", "600", "SIGUSR2"
    )
    cluster.run("scancel", "--signal", "USR2", number)
    sent.communicate(timeout=240)
    assert log(shared_folder).count("from") == 1
    assert cluster.job_field(number, "Restarts") == "0"


def test_requeued_by_the_cluster_it_goes_on(
    fasttrain: Any, cluster: Any, shared_folder: Path
) -> None:
    sent, number = begin(fasttrain, cluster, shared_folder, SAVES, "--requeue", "1")
    cluster.run("scontrol", "requeue", number)
    _, said = sent.communicate(timeout=240)
    assert sent.returncode == 0, said.decode()
    assert log(shared_folder).endswith("done 60\n")
    assert log(shared_folder).count("from") == 2


def test_preempted_by_another_partition_it_goes_on(
    fasttrain: Any, cluster: Any, shared_folder: Path
) -> None:
    sent, number = begin(
        fasttrain, cluster, shared_folder, RESUMES, "--partition", "low", "--nodes", "1",
        "--exclusive", "--nodelist", "node1", "--requeue", "1", "--", "60", "SIGUSR2",
    )  # fmt: skip
    cluster.submit("sleep 2", "--partition=main", "--nodelist=node1", "--exclusive")
    _, said = sent.communicate(timeout=240)
    assert sent.returncode == 0, said.decode()
    assert log(shared_folder).endswith("done 60\n")
    assert cluster.job_field(number, "Restarts") == "1"


@pytest.mark.slow
def test_a_time_limit_does_not_end_the_run(
    fasttrain: Any, cluster: Any, shared_folder: Path
) -> None:
    # SLURM looks every 30 s and sends the signal early rather than late: at about 20 s of 60.
    sent, number = begin(
        fasttrain, cluster, shared_folder, RESUMES, "--time", "1", "--signal", "USR2@35",
        "--requeue", "5", "--", "500", "SIGUSR2",
    )  # fmt: skip
    _, said = sent.communicate(timeout=280)
    assert sent.returncode == 0, said.decode()
    assert log(shared_folder).endswith("done 500\n")
    assert int(cluster.job_field(number, "Restarts")) >= 1


@pytest.mark.slow
def test_a_dead_node_has_it_queued_again(cluster_losing_nodes: Any, shared_folder: Path) -> None:
    fasttrain = cluster_losing_nodes.fasttrain(shared_folder)
    sent, number = begin(
        fasttrain, cluster_losing_nodes, shared_folder, SAVES.replace("< 60", "< 200"),
        "--max-restarts", "1", "--nodes", "1", "--nodelist", "node2",
    )  # fmt: skip
    cluster_losing_nodes.stop_node("node2")
    cluster_losing_nodes.until(
        lambda: "down" in cluster_losing_nodes.node_state("node2"), 90, lambda: "node2"
    )
    cluster_losing_nodes.start_node("node2")
    _, said = sent.communicate(timeout=180)
    assert sent.returncode == 0, said.decode()
    assert log(shared_folder).endswith("done 200\n")
    assert cluster_losing_nodes.job_field(number, "Restarts") == "1"


def test_without_accounting_a_job_that_vanished_is_told(
    cluster_without_accounting: Any, shared_folder: Path
) -> None:
    fasttrain = cluster_without_accounting.fasttrain(shared_folder)
    sent, number = begin(fasttrain, cluster_without_accounting, shared_folder, SAVES)
    cluster_without_accounting.run("scancel", "--signal=KILL", "--full", number)
    _, said = sent.communicate(timeout=240)
    assert sent.returncode > 128, said.decode()
    assert b"CANCELLED" in fasttrain("job", "show", number).stdout
    # What the tasks told of their ends does for one that SLURM has forgotten; without it, nothing.
    shutil.rmtree(run_dir(shared_folder) / "tasks")
    gone = json.loads((run_dir(shared_folder) / "submitted.json").read_text())
    gone["job_id"] = "4123456789"
    (run_dir(shared_folder) / "submitted.json").write_text(json.dumps(gone))
    done = fasttrain("job", "wait", timeout_s=240)
    assert done.returncode == 69
    assert FORGOTTEN.encode() in done.stderr
