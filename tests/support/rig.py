"""The worker's levers in the test's own process: in place inside a with-block, gone behind it."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from fasttrain.model.attempts import Guards, HangWatch, Restarts
from fasttrain.model.codec import loads
from fasttrain.model.decision import Decision, Source, SourceKind
from fasttrain.model.levers import LEVERS, Amp, Compile, Levers
from fasttrain.model.outcome import RankReport
from fasttrain.model.plan import LaunchPlan, Processes, Target
from fasttrain.model.settings import Settings
from fasttrain.shim.runtime import Runtime

torch.set_num_threads(1)  # two cores are shared: spinning threads cost more than they bring

OFF = {"amp": "off", "compile": "off", "scope": "model", "optimizer": "keep", "matmul": "keep",
       "graphs": None, "hang": False, "nan": "off"}  # fmt: skip
FLAG = Source(SourceKind.FLAG, "--flag")
MACHINE = Source(SourceKind.MACHINE, "the machine")


def plan(run_dir: Path, source: Source = FLAG, **choices: Any) -> LaunchPlan:
    """Return a plan with every lever off but those that are chosen."""
    chosen = {**OFF, "device": "cpu", "max_steps": None, "strict": False, **choices}

    def decide(value: Any) -> Decision[Any]:
        return Decision(value, "a test wants it", source)

    off = {name: row.off_value("cpu", Settings()) for name, row in LEVERS.items()}
    levers = Levers(**{name: decide(chosen.get(name, value)) for name, value in off.items()})
    compiled = Compile(chosen["compile"], chosen["compile"], chosen["scope"], chosen["graphs"])
    amp = Amp(chosen["amp"], chosen["device"])
    levers = replace(levers, amp=decide(amp), compile=decide(compiled))
    workers = chosen.get("loader_workers")
    return LaunchPlan(
        fasttrain_version="0", run_id="test", run_dir=str(run_dir),
        target=Target("script", "train.py"), cwd=str(run_dir),
        device_kind=decide("cpu"), devices=decide(()), processes=decide(Processes("direct")),
        environment=(), levers=levers, shutdown_timeout_s=30,
        guards=Guards(decide(HangWatch(chosen["hang"])), decide(chosen["nan"])), argv=("python",),
        restarts=decide(Restarts()), max_steps=chosen["max_steps"], strict=chosen["strict"],
        loader_workers=decide(workers) if workers else None, proof=chosen.get("proof"),
    )  # fmt: skip


@contextlib.contextmanager
def rig(source: Source = FLAG, **choices: Any) -> Iterator[Runtime]:
    """Install the levers, and put torch back behind the block."""
    with tempfile.TemporaryDirectory() as run_dir:
        runtime = Runtime(plan(Path(run_dir), source, **choices), 0, time.perf_counter())
        runtime.install()
        try:
            yield runtime
        finally:
            runtime.close()


def read_report(run_dir: Path, rank: int = 0) -> RankReport:
    """Return what a worker reported."""
    return loads(RankReport, (run_dir / f"rank-{rank}.json").read_bytes())


@contextlib.contextmanager
def backend(name: str | Callable[..., Any]) -> Iterator[None]:
    """Let every torch.compile take a backend that is quicker than inductor."""
    original = torch.compile

    def quick(model: Any = None, **options: Any) -> Any:
        return original(model, **{**options, "mode": None, "backend": name})

    with mock.patch.object(torch, "compile", quick):
        yield
    torch._dynamo.reset()


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def network() -> nn.Sequential:
    """Return a small model, always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def train(model: nn.Module, steps: int = 3) -> list[float]:
    """Train a model on `X` and give the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = model(X).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Probe(nn.Module):
    """Returns the dtype in which its linear layer computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        self.seen.append(y.dtype)
        return y
