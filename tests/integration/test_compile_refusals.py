"""Compiled models refuse, and do again, what they do without compilation: the real command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fasttrain.files import load
from fasttrain.model.outcome import RankReport, State

pytestmark = pytest.mark.timeout(900)
PATIENCE_S = 700.0  # several real compilations

# Large enough for parallel loops, which no exception leaves.
REFUSES = """
import functools
import torch, torch.nn as nn, torch.nn.functional as F

class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(500, 64), nn.Linear(64, 500)
    def forward(self, ids, classes):
        scores = self.head(F.gelu(self.table(ids)))
        return F.cross_entropy(scores.view(-1, 500), classes.view(-1))

class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
    def forward(self, x):
        return F.binary_cross_entropy(torch.sigmoid(self.layer(x)), x)

class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
    def forward(self, x):
        y = self.layer(x).exp()
        assert torch.isfinite(y).all(), "the scale explodes"
        return y.mean()

class Whiten(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Dropout(0.1)
    def forward(self, x):
        h = self.drop(self.norm(self.first(x)))
        try:
            return torch.linalg.svdvals(h).mean()
        except RuntimeError:
            return h.nan_to_num().square().mean() + torch.rand(())

@functools.lru_cache
def projection(rows, columns):
    return torch.randn(rows, columns) / rows

class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
    def forward(self, x):
        return torch.cos(self.layer(x) @ projection(64, 128)).mean()

def train(model, batches):
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    for batch in batches:
        try:
            loss = model(*batch)
        except (ArithmeticError, AssertionError, LookupError, RuntimeError) as error:
            print(type(model).__name__, "skips a batch:", type(error).__name__, str(error)[:60])
            continue
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(type(model).__name__, f"{loss.item():.3f}")
    print("drawn", torch.rand(()).item())

torch.manual_seed(0)
ids, classes = torch.randint(0, 500, (2, 16, 64))
no_word, no_class = ids.clone(), classes.clone()
no_word[3, 7], no_class[5, 1] = 503, 500
good = ids, classes
train(Language(), [good, good, (no_word, classes), (ids, no_class), good])
x = torch.rand(256, 64)
broken = x.clone()
broken[4, 4] = torch.nan
for model in (Coder(), Flow(), Whiten(), Features()):
    train(model, [(x,), (x,), (broken,), (x,)])
"""


def test_a_compiled_script_meets_its_own_exceptions(fasttrain: Any, script: Any) -> None:
    path: Path = script(REFUSES)
    alone = subprocess.run(
        [sys.executable, path], cwd=path.parent, capture_output=True, text=True, timeout=99
    )
    options = ("--compile", "default", "--amp", "off", "--quiet", "--run-dir", "run")
    done = fasttrain("run", *options, path, timeout_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().splitlines() == alone.stdout.splitlines()
    report = load(RankReport, path.parent / "run" / "rank-0.json")
    outcome = next(one for one in report.outcomes if one.lever == "compile")
    assert (outcome.state, outcome.counts["targets"]) == (State.APPLIED, 5), outcome
    notes = " ".join(outcome.notes)
    assert "Whiten was repeated" in notes
    assert "Flow was repeated" not in notes
    assert "runs eagerly" not in notes
