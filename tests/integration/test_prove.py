"""The real ``fasttrain run --prove``: what it finds, and that it leaves no trace."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from fasttrain.model.places import scratch_folder

# Seeds nothing: weights, batches, augmentation, the order of a set and a draw of numpy's.
UNSEEDED = """
import os, random
import numpy
import torch
from torch import nn
names = list({"scale", "shift", "noise"})
net = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 4))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
truth = torch.randn(24, 4)
os.makedirs("out", exist_ok=True)
for step in range(STEPS):
    x = torch.randn(32, 24) * (1 + 0.1 * random.random()) + float(numpy.random.rand()) / 10
    x = x * (1 + names.index("noise") / 10)
    loss = nn.functional.cross_entropy(net(x), (x @ truth).argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    torch.save(net.state_dict(), "out/model.pt")
    with open("log.txt", "a") as log:
        print(step, loss.item(), file=log)
print("done", flush=True)
"""
# A lever that goes wrong: what is in bf16 is 5 % too large.
WRONG = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(24, 48), nn.Linear(48, 4)
    def forward(self, x):
        h = self.a(x)
        return self.b((h * FACTOR if h.dtype is torch.bfloat16 else h).relu())
torch.manual_seed(3)
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
truth = torch.randn(24, 4)
for step in range(1000):
    x = torch.randn(32, 24)
    loss = nn.functional.cross_entropy(net(x), (x @ truth).argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
FAILS_LOW = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.calls = nn.Linear(8, 4), 0
    def forward(self, x):
        self.calls += 1
        y = self.a(x)
        if self.calls >= 5 and y.dtype is torch.bfloat16:
            import os
            os._exit(3)
        return y
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(1000):
    loss = net(torch.randn(16, 8)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


# Each rank has batches of its own, and the script says what it knows of them.
OWN_RANKS = """
import os
import torch
from torch import distributed, nn
distributed.init_process_group("gloo")
rank = distributed.get_rank()
net = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
torch.manual_seed(rank)
for step in range(STEPS):
    loss = net(torch.randn(16, 8)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    open(f"log-{rank}.txt", "a").write("x")
    print("LOSS", loss.item(), flush=True)
    ENDS
"""
RANKS = ("--nproc-per-node", "2", "--device", "cpu")


def left(folder: Path) -> dict[str, bytes]:
    """Return all files of a folder but those of runs."""
    found = (path for path in folder.rglob("*") if "fasttrain_runs" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found if path.is_file()}


def result(done: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(done.stdout)
    assert (content["schema"], content["kind"]) == (1, "proof")
    data: dict[str, Any] = content["data"]
    return data


def no_scratch(run_dir: Path) -> bool:
    return not [*scratch_folder("x").parent.glob(f"fasttrain-{run_dir.name}*")]


def test_the_runs_draw_the_same_numbers_and_leave_nothing(
    fasttrain: Any, script: Any, only_run_dir: Any, tmp_path: Path
) -> None:
    path = script(UNSEEDED.replace("STEPS", "10**9"))
    (tmp_path / "log.txt").write_text("before\n")
    before = left(tmp_path)
    done = fasttrain("run", path, "--prove", "--max-steps", "30", "--json", timeout_s=200)
    assert done.returncode == 0, done.stderr
    report = result(done)
    assert report["end"] == "steps"
    assert report["steps"] == 30
    assert report["curves"]["finding"] in ("same bits", "within rounding")
    assert {"plain", "chosen"} <= report["losses"].keys()
    assert len(report["losses"]["plain"]) == 30
    assert [o["state"] for o in report["levers"] if o["lever"] == "optimizer"] == ["applied"]
    assert report["speed"]["pairs"] > 0
    assert left(tmp_path) == before
    run_dir = only_run_dir()
    assert json.loads((run_dir / "proof.json").read_text()) == report
    assert no_scratch(run_dir)
    assert b"optimizer fused" in done.stderr


def test_what_bf16_rounds_is_right(fasttrain: Any, script: Any) -> None:
    path = script(WRONG.replace("FACTOR", "1.0"))
    words = ("--amp", "bf16", "--max-steps", "60")
    done = fasttrain("run", path, "--prove", *words, "--json", timeout_s=280)
    assert done.returncode == 0, done.stdout
    report = result(done)
    assert report["curves"]["finding"] == "within rounding"
    assert report["losses"]["chosen"] != report["losses"]["plain"]
    assert report["losses"]["control-1"][:3] == report["losses"]["plain"][:3]


def test_a_lever_that_goes_wrong_is_found(fasttrain: Any, script: Any) -> None:
    path = script(WRONG.replace("FACTOR", "1.05"))
    words = ("--amp", "bf16", "--max-steps", "60")
    done = fasttrain("run", path, "--prove", *words, timeout_s=280)
    assert done.returncode == 76, done.stdout
    assert b"the losses differ" in done.stdout


def test_a_failure_with_the_levers_only_is_told(fasttrain: Any, script: Any) -> None:
    words = ("--amp", "bf16", "--max-steps", "60")
    done = fasttrain("run", script(FAILS_LOW), "--prove", *words, "--json", timeout_s=200)
    assert done.returncode == 76, done.stdout
    report = result(done)
    assert (report["end"], report["curves"]["finding"]) == ("failed", "differs")
    assert report["failed"].keys() == {"chosen"}


@pytest.mark.parametrize(
    ("text", "code", "end"),
    [
        ("print('no torch')", 69, "script"),
        ("import sys; sys.exit(7)", 7, "failed"),
        (UNSEEDED.replace("STEPS", "9") + "raise SystemExit(5)", 5, "failed"),
        (UNSEEDED.replace("STEPS", "9"), 0, "script"),
        (UNSEEDED.replace("STEPS", "9").replace("torch\n", "torch, time\n", 1).replace(
            "names =", "torch.manual_seed(time.time_ns() % 10**9); names ="), 69, "script"),
    ],
    ids=["no torch", "an error", "an error at its end", "nine steps", "seeded by the clock"],
)  # fmt: skip
def test_scripts_that_end(fasttrain: Any, script: Any, text: str, code: int, end: str) -> None:
    done = fasttrain("run", script(text), "--prove", "--json", timeout_s=200)
    assert done.returncode == code, done.stderr
    assert result(done)["end"] == end


@pytest.mark.parametrize("words", [(), RANKS], ids=["one", "ranks"])
@pytest.mark.parametrize("killed", [False, True], ids=["ctrl-C", "kill -9"])
def test_an_end_from_outside_leaves_nothing(
    fasttrain: Any,
    script: Any,
    only_run_dir: Any,
    until: Any,
    tmp_path: Path,
    killed: bool,
    words: tuple[str, ...],
) -> None:
    waits = "import time; step < 3 or print('asleep', flush=True) or time.sleep(1000)"
    path = script(
        UNSEEDED.replace("STEPS", "10**9").replace("loss.backward()", f"loss.backward(); {waits}")
    )
    before = left(tmp_path)
    process = fasttrain.start(
        *("run", path, "--prove", "--max-steps", "1000000", "--json", *words),
        stdout=subprocess.PIPE,
    )
    logs = "fasttrain_runs/*/*/rank-0.log"
    until(lambda: any("asleep" in log.read_text() for log in tmp_path.glob(logs)))
    run_dir = only_run_dir()
    assert not no_scratch(run_dir)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 4, "two launchers with a worker each, and their guardians"
    process.send_signal(signal.SIGKILL if killed else signal.SIGINT)
    out, _ = process.communicate(timeout=240)
    until(lambda: not [one for one in started if one.is_running() and one.status() != "zombie"])
    until(lambda: no_scratch(run_dir))
    assert left(tmp_path) == before
    if not killed:
        assert process.returncode == 130
        assert json.loads(out)["data"]["end"] == "interrupted"


def test_processes_without_anything_in_common_are_refused(fasttrain: Any, script: Any) -> None:
    done = fasttrain("run", script("pass"), "--prove", "--strategy", "none", *RANKS)
    assert done.returncode == 78
    assert b"[prove-ranks]" in done.stderr


def test_ranks_train_what_one_process_trains(
    fasttrain: Any, script: Any, only_run_dir: Any, tmp_path: Path
) -> None:
    path = script(UNSEEDED.replace("STEPS", "10**9").replace(" nn.Dropout(0.2),", ""))
    before = left(tmp_path)
    done = fasttrain("run", path, "--prove", "--max-steps", "12", "--json", *RANKS, timeout_s=280)
    assert done.returncode == 0, done.stdout + done.stderr
    report = result(done)
    assert (report["end"], report["steps"]) == ("steps", 12)
    assert len(set(report["losses"]["plain"])) == 12
    assert report["speed"]["pairs"] > 0
    assert [o["state"] for o in report["levers"] if o["lever"] == "strategy"] == ["applied"]
    assert b"of 2 ranks with strategy ddp" in done.stderr
    run_dir = only_run_dir()
    plans = [json.loads((run_dir / it / "plan.json").read_text()) for it in ("plain", "chosen")]
    assert [plan["processes"]["value"]["nproc_per_node"] for plan in plans] == [1, 2]
    assert left(tmp_path) == before
    assert no_scratch(run_dir)


def test_what_the_ranks_of_a_model_draw_is_told(fasttrain: Any, script: Any) -> None:
    path = script(UNSEEDED.replace("STEPS", "10**9"))
    done = fasttrain("run", path, "--prove", "--max-steps", "9", "--json", *RANKS, timeout_s=280)
    assert done.returncode == 69, done.stdout
    assert "dropout" in result(done)["curves"]["reason"]


def test_a_script_with_ranks_of_its_own_has_them_on_both_sides(
    fasttrain: Any, script: Any, only_run_dir: Any, tmp_path: Path
) -> None:
    path = script(OWN_RANKS.replace("STEPS", "9").replace("ENDS", ""))
    before = left(tmp_path)
    done = fasttrain("run", path, "--prove", "--json", *RANKS, timeout_s=280)
    assert done.returncode == 0, done.stdout + done.stderr
    report = result(done)
    assert report["end"] == "script"
    assert left(tmp_path) == before
    logs = [only_run_dir() / "plain" / f"rank-{rank}.log" for rank in (0, 1)]
    printed = [
        [float(line.split()[1]) for line in log.read_text().splitlines() if "LOSS" in line]
        for log in logs
    ]
    assert printed[0] != printed[1]
    means = [sum(pair) / 2 for pair in zip(*printed, strict=True)]
    assert report["losses"]["plain"] == pytest.approx(means, rel=1e-12)


@pytest.mark.parametrize(
    ("ends", "code", "reason"),
    [
        ("assert step < 5 or not rank, 'rank one'", 1, "the script fails without levers, too"),
        ("step == 5 and rank and os._exit(0)", 1, "the script fails without levers, too"),
    ],
    ids=["raises", "leaves"],
)
def test_a_rank_that_ends_alone(
    fasttrain: Any, script: Any, ends: str, code: int, reason: str
) -> None:
    path = script(OWN_RANKS.replace("STEPS", "10**9").replace("ENDS", ends))
    done = fasttrain("run", path, "--prove", "--json", *RANKS, timeout_s=280)
    assert done.returncode == code, done.stdout + done.stderr
    report = result(done)
    assert report["curves"]["reason"] == reason
    assert report["failed"].keys() == {"plain", "chosen"}


def test_a_run_that_proves_nothing_keeps_all_writes(fasttrain: Any, script: Any) -> None:
    done = fasttrain("run", script("pass"), "--keep-writes")
    assert done.returncode == 2
    assert b"[keep-writes]" in done.stderr


def test_the_runs_may_write_the_scripts_files(fasttrain: Any, script: Any, tmp_path: Path) -> None:
    path = script(UNSEEDED.replace("STEPS", "4"))
    done = fasttrain("run", path, "--prove", "--keep-writes", timeout_s=200)
    assert b"what the script writes is kept" in done.stderr
    assert (tmp_path / "out/model.pt").exists()
