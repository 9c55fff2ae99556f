"""Ranks under ``--compile auto`` really compile: at the same steps, and as one would by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fasttrain.files import load
from fasttrain.model.compile_auto import COMPILE_AUTO_FILE, Switched
from support.rank_forks import run_ranks
from support.zygote import Zygote

pytestmark = pytest.mark.timeout(600)
PATIENCE_S = 500.0

BEGIN = """
import gc, json, posix, sys, time
import torch
from torch import nn
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.b = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 32)

    def forward(self, x):
        return self.b(torch.nn.functional.gelu(self.n(self.a(x))))

def batch_of(step):
    return data[step % 8 * 32:][:32]

def keep(name, value):  # of each rank, also where rank 0 alone writes files
    file = posix.open(f"{name}-{posix.getpid()}", posix.O_CREAT | posix.O_WRONLY)
    posix.write(file, json.dumps(value).encode())

data = torch.randn(256, 32)
"""
INJECTED = "net = inner = Net()"
OWN = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
inner = Net()
net = DDP(inner)
data = data + dist.get_rank()
"""
# Sleeps, so that the copy has time. All ranks hear at the same step what was decided.
AUTO = """
def auto():
    kind = sys.modules["fasttrain.shim.compile_auto.switch"].SwitchedProcess
    return next(one for one in gc.get_objects() if isinstance(one, kind))

opt = torch.optim.SGD(net.parameters(), lr=1e-3)
seen, found, left, step = [], auto(), 20, 0
while left:
    on = found._on and found._on_since_switch
    loss = (net(batch_of(step)) - batch_of(step)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    seen.append((on, loss.item()))
    step += 1
    if found._found.phase not in ("watching", "compiling", "comparing"):
        left -= 1
    elif found._found.phase != "comparing":
        time.sleep(0.02)
keep("seen", seen)
"""
# The same steps, compiled where the others had compiled ones.
BY_HAND = """
import functools, os
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath("run-auto/inductor")
import torch._dynamo, torch._functorch.config as functorch, torch._inductor.config as inductor
functorch.donated_buffer, functorch.force_non_lazy_backward_lowering = False, True
inductor.fallback_random = True
forwards = {False: Net.forward, True: torch.compile(Net.forward)}
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
losses = []
for step, on in enumerate(json.load(open("flags.json"))):
    inner.forward = functools.partial(forwards[on], inner)
    loss = (net(batch_of(step)) - batch_of(step)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
keep("losses", losses)
"""


def kept(folder: Path, name: str) -> list[Any]:
    return [json.loads(path.read_text()) for path in folder.glob(f"{name}-*")]


@pytest.mark.parametrize("made", [INJECTED, OWN], ids=["injected", "own"])
def test_two_ranks_switch_together(zygote: Zygote, tmp_path: Path, made: str) -> None:
    script, by_hand = tmp_path / "train.py", tmp_path / "by_hand.py"
    script.write_text(BEGIN + made + AUTO)
    by_hand.write_text(BEGIN + made + BY_HAND)
    common = ("--amp", "off", "--optimizer", "keep")
    options = (*common, "--compile", "auto", "--max-steps", "100000000")
    done = run_ranks(zygote, tmp_path, script, ranks=2, options=options, timeout_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    found = load(Switched, tmp_path / "run" / COMPILE_AUTO_FILE)
    assert found.phase in ("kept", "dropped"), found
    assert found.cached, "all graphs were those of the copy"
    first, second = kept(tmp_path, "seen")
    flags = [on for on, _ in first]
    assert flags == [on for on, _ in second]
    assert flags.index(True) == found.from_step
    (tmp_path / "flags.json").write_text(json.dumps(flags))
    (tmp_path / "run").rename(tmp_path / "run-auto")
    options = (*common, "--compile", "off")
    done = run_ranks(zygote, tmp_path, by_hand, ranks=2, options=options, timeout_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    both = sorted([loss for _, loss in one] for one in (first, second))
    for seen, expected in zip(both, sorted(kept(tmp_path, "losses")), strict=True):
        assert seen == pytest.approx(expected, rel=1e-4)
