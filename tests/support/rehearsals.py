"""Training loops on a simulated device, whose synchronisations are recorded.

The device type that `main` makes stays for the rest of a process, so that a test starts one:
``python -c "from support.rehearsals import main; main(CACHE)"``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fasttrain.model.levers import Strategy
from fasttrain.model.plan import Processes
from fasttrain.shim.runtime import Runtime
from support import rig
from support.npu_site import FAKE_NPU
from support.synchronizations import Synchronizations, recording

DEVICE = "npu:0"
STEPS = 6
STEPS_OF_RANKS = 12  # whose calls are verified at first
Found = list[tuple[str, str, list[int]]]


def make_device(cache: Path) -> Any:
    """Make torch know the device, and a fused optimizer on it."""
    sys.path.insert(0, str(FAKE_NPU))
    import simulated_npu  # type: ignore[import-not-found]

    module = simulated_npu.activate(cache)
    alias = module.extension.cpu_alias

    def fused(*args: Any, **kwargs: Any) -> None:
        args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, alias, (args, kwargs))
        torch._fused_adamw_(*args, **kwargs)

    torchs: Any = torch.library
    module.kernels = torchs.Library("aten", "IMPL")
    module.kernels.impl("_fused_adamw_", fused, "PrivateUse1")
    return module


class Loop:
    """A training loop on the device."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        hidden = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1))
        self.model = nn.Sequential(hidden, nn.Linear(8, 4)).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.x = torch.linspace(-1, 1, 32, device=DEVICE).reshape(8, 4)

    def loss(self) -> Any:
        return self.model(self.x).square().mean()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()


class Accumulating(Loop):
    """Makes two backward passes for each step, and clips their gradients."""

    def step(self) -> None:
        for _ in range(2):
            self.loss().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Asking(Loop):
    """Asks torch.autograd.grad for gradients."""

    def step(self) -> None:
        parameters = list(self.model.parameters())
        gradients = torch.autograd.grad(self.loss(), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()


class Hooked(Loop):
    """Has a hook on gradients, and a number that is trained beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), device=DEVICE))
        self.optimizer.add_param_group({"params": [self.scale]})
        last: Any = self.model[1]
        last.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))

    def loss(self) -> Any:
        return super().loss() * self.scale


class Judging(Loop):
    """Has a loss on probabilities."""

    def loss(self) -> Any:
        probabilities = self.model(self.x).sigmoid()
        return nn.functional.binary_cross_entropy(probabilities, torch.ones_like(self.x))


def _read(gradient: Any) -> None:
    gradient.item()


class Waiting(Loop):
    """Synchronises by itself in each way that is recorded, and in ways that don't."""

    def step(self) -> None:
        loss = self.loss()
        loss.item()
        loss.cpu()
        loss.tolist()
        bool(loss > 0)
        torch.equal(self.x, self.x)
        self.x[self.x > 0]
        self.x.nonzero()
        torch.tensor(1.0, device=DEVICE)
        on_host = torch.ones(3)
        on_host.to(DEVICE, non_blocking=True)
        self.x[0, :3].copy_(on_host)
        torch.npu.synchronize()  # type: ignore[attr-defined]
        torch.npu.Event().synchronize()  # type: ignore[attr-defined]
        total: Any = next(self.model.parameters()).sum()
        total.register_hook(_read)
        total.backward()  # in another thread

        torch.full((), 1.0, device=DEVICE)
        pinned = on_host.pin_memory()
        pinned.to(DEVICE, non_blocking=True)
        pinned.copy_(self.x[0, :3], non_blocking=True)
        self.x.to(DEVICE, torch.float16)


class Loading(Loop):
    """Is one of several ranks, and reads its batches from a dataset on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        rows = torch.linspace(-1, 1, 8 * 4 * STEPS_OF_RANKS, device=DEVICE).reshape(-1, 4)
        self.batches = iter(DataLoader(TensorDataset(rows), batch_size=8))

    def loss(self) -> Any:
        (x,) = next(self.batches)
        return self.model(x).square().mean()


class Unowned(Loading):
    """Trains a number that no model has, whose gradient DDP doesn't average."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), device=DEVICE))
        self.optimizer.add_param_group({"params": [self.scale]})

    def loss(self) -> Any:
        return super().loss() * self.scale


FAST = {"amp": "bfloat16", "optimizer": "fused", "matmul": "high", "compile": "default"}
ALONE: dict[str, tuple[dict[str, Any], type[Loop]]] = {
    "waits": ({}, Waiting),
    "guards": ({}, Loop),
    "bf16": ({"amp": "bfloat16"}, Accumulating),
    "bf16, hooks": ({"amp": "bfloat16"}, Hooked),
    "bf16, probabilities": ({"amp": "bfloat16"}, Judging),
    "bf16, fused, compiled": (FAST, Loop),
    "bf16, fused, compiled, accumulating": (FAST, Accumulating),
    "fp16": ({"amp": "float16"}, Loop),
    "fp16, fused, hooks": ({"amp": "float16", "optimizer": "fused"}, Hooked),
    "fp16, autograd.grad": ({"amp": "float16"}, Asking),
}
RANKS: dict[str, tuple[dict[str, Any], type[Loop]]] = {
    "ranks": ({"amp": "bfloat16", "optimizer": "fused"}, Loading),
    "ranks, unowned": ({}, Unowned),
}


def rehearse(levers: dict[str, Any], loop: type[Loop]) -> tuple[Found, dict[str, str]]:
    """Return what synchronised in which steps, and the states of the levers."""
    with (
        rig.backend("aot_eager"),
        rig.rig(**levers, device="npu", nan="warn", hang=True) as runtime,
    ):
        return run(runtime, loop, STEPS)


def run(runtime: Runtime, kind: type[Loop], steps: int) -> tuple[Found, dict[str, str]]:
    """Make the steps of a loop, each with an event, whose interval is half a second."""
    with mock.patch("fasttrain.shim.runtime.EVENT_EVERY_S", 0.0):
        loop = kind()
        with recording("npu") as recorder:
            make_steps(loop, recorder, steps)
    found = [(what, where, at) for (what, where), at in recorder.found.items()]
    return found, {name: outcome.state.value for name, outcome in runtime.outcomes().items()}


def make_steps(loop: Loop, recorder: Synchronizations, steps: int) -> None:
    """Tell the recorder the number of each step."""
    for number in range(steps):
        recorder.step = number
        loop.step()


def rehearse_ranks(levers: dict[str, Any], loop: type[Loop]) -> tuple[Found, dict[str, str]]:
    """Return rank 0's findings of two ranks, each a fork of this process."""
    torchs: Any = dist
    with tempfile.TemporaryDirectory() as folder:
        # It serves from a thread of its own, which the forks don't have.
        store = torchs.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        forks = [_fork(rank, store.port, Path(folder), levers, loop) for rank in (0, 1)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in forks]
        assert codes == [0, 0], codes
        found, states = json.loads((Path(folder) / "found-0").read_text())
        return found, states


def _fork(rank: int, port: int, folder: Path, levers: dict[str, Any], loop: type[Loop]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        both = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        of_all = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        os.environ |= {name: str(value) for name, value in (both | of_all).items()}
        torch.npu.set_device(0)  # type: ignore[attr-defined]
        with ExitStack() as undo:
            runtime = Runtime(_plan(folder, levers), rank, time.perf_counter())
            undo.callback(runtime.close)
            runtime.install()
            found = run(runtime, loop, STEPS_OF_RANKS)
        (folder / f"found-{rank}").write_text(json.dumps(found))
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def _plan(folder: Path, levers: dict[str, Any]) -> Any:
    plan = rig.plan(
        folder, **levers, device="npu", nan="warn", strategy=Strategy("ddp", collectives="hccl")
    )
    processes = replace(plan.processes, value=Processes("torchrun", 2))
    return replace(plan, processes=processes)


def main(cache: str) -> None:
    """Print what each loop's synchronisations are, and the states of its levers."""
    make_device(Path(cache))
    # First: a process that has computed in threads of autograd's can't be forked.
    found = {name: rehearse_ranks(*RANKS[name]) for name in RANKS}
    found |= {name: rehearse(*ALONE[name]) for name in ALONE}
    print(json.dumps(found))  # noqa: T201
