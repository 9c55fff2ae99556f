"""Ranks that tune: the same levers are on at the same steps, whoever makes them one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fasttrain.files import load
from fasttrain.model.tuning import TUNING_FILE, Tuning, TuningReport
from support.rank_forks import run_ranks
from support.zygote import Zygote

# What is on, from which step on. `posix` and not `os`, which fasttrain answers for all ranks.
RECORDS = """
import atexit, json, posix, sys
import torch
from torch import nn
from torch.nn import functional
tuner, seen = sys.modules["fasttrain.shim.tune.tuner"].Tuner, []
original = tuner._set
def _set(self, on):
    original(self, on)
    seen.append([self._meter.steps, sorted(on)])
tuner._set = _set
def tell():
    file = posix.open(f"seen-{posix.getpid()}", posix.O_CREAT | posix.O_WRONLY)
    posix.write(file, json.dumps(seen).encode())
atexit.register(tell)
"""
INJECTED = """
torch.manual_seed(0)
net = nn.Sequential(
    nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Dropout(0.1), nn.Tanh(),
    *(nn.Linear(24, 24) for _ in range(3)), nn.Linear(24, 4),
)
"""
OWN = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
torch.manual_seed(0)
net = DDP(nn.Sequential(*(nn.Linear(24, 24) for _ in range(3)), nn.Linear(24, 4)))
torch.manual_seed(dist.get_rank())
"""
TRAINS = """
opt = torch.optim.Adam(net.parameters(), lr=1e-4)
while True:
    x, y = torch.randn(64, 24), torch.randint(0, 4, (64,))
    loss = functional.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize("made", [INJECTED, OWN], ids=["injected", "own"])
def test_the_same_levers_are_on_at_the_same_steps(
    zygote: Zygote, tmp_path: Path, made: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(RECORDS + made + TRAINS)
    options = ("--amp", "bf16", "--compile", "off")
    tuning = Tuning(9.0, "", ())
    done = run_ranks(zygote, tmp_path, script, ranks=2, options=options, tuning=tuning)
    assert done.returncode == 0, done.stderr
    first, second = [json.loads(path.read_text()) for path in tmp_path.glob("seen-*")]
    assert first == second
    assert ["amp"] in [on for _, on in first]
    report = load(TuningReport, tmp_path / "run" / TUNING_FILE)
    assert report.end in ("decided", "budget")
    assert [one.levers for one in report.compared] == [("amp",), ("optimizer",)]
    parity = report.compared[0].parity
    assert parity is not None
    assert parity.allowed, "a call was captured and repeated"
    assert parity.right is not False, parity.reason
