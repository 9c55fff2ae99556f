"""Whole runs on simulated NPUs: torch finds them, and so does ``npu-smi``.

Nothing here has run on a card: fp16 is the CPU's, and hccl is gloo (``tests/fake_npu``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.npu_site import pretend_triton

# Its fourth batch has a sample that overflows in fp16, and the last rank gets it.
TASK = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(6)
x, y = torch.randn(80, 5), torch.randn(80, 1)
if OVERFLOWS:
    x[3 * 8 + 7] = 3e5  # fp16 ends at 65504
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).to("npu")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
"""
PLAIN = """
for inputs, wanted in DataLoader(TensorDataset(x, y), batch_size=8):
    loss = (model(inputs.to("npu")) - wanted.to("npu")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
print([p.double().sum().item().hex() for p in model.parameters()])
"""
BY_HAND = """
scaler = SCALER
for inputs, wanted in DataLoader(TensorDataset(x, y), batch_size=8):
    with torch.autocast("npu", dtype=torch.float16):
        out = model(inputs.to("npu"))
    loss = (out.float() - wanted.to("npu")).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(loss.item())
print([p.double().sum().item().hex() for p in model.parameters()])
"""
VISIBLE = """
import os
print(os.environ["ASCEND_RT_VISIBLE_DEVICES"], "of", torch.npu.device_count())
"""
TORCHS = 'torch.amp.GradScaler("npu")'


def text(loop: str, *, overflows: bool = True, scaler: str = TORCHS) -> str:
    return (TASK + loop).replace("OVERFLOWS", str(overflows)).replace("SCALER", scaler)


def report(run_dir: Path, rank: int = 0) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((run_dir / f"rank-{rank}.json").read_text())
    return read


def outcomes(run_dir: Path, rank: int = 0) -> dict[str, Any]:
    return {outcome["lever"]: outcome for outcome in report(run_dir, rank)["outcomes"]}


def printed(done: Any) -> list[str]:
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


def test_fp16_trains_as_the_loop_written_by_hand(
    fasttrain: Any, script: Any, npus: Any, only_run_dir: Any
) -> None:
    environ = npus()
    by_hand = subprocess.run(
        [sys.executable, script(text(BY_HAND), "by_hand.py")],
        env={**fasttrain.environ, **environ},
        capture_output=True,
    )
    ours = fasttrain("run", "--amp", "fp16", "--optimizer", "keep", script(text(PLAIN)),
                     env=environ)  # fmt: skip
    assert printed(ours) == printed(by_hand)
    scaling = outcomes(only_run_dir())["loss_scaling"]
    assert (scaling["state"], scaling["counts"]["skipped steps"]) == ("applied", 1)
    assert scaling["counts"]["scale"] == 2**15


def test_a_skipped_step_leaves_the_fused_optimizer_in_place(
    fasttrain: Any, script: Any, npus: Any, only_run_dir: Any
) -> None:
    printed(fasttrain("run", "--amp", "fp16", script(text(PLAIN)), env=npus()))
    found = outcomes(only_run_dir())
    assert found["loss_scaling"]["counts"]["skipped steps"] == 1
    # Of 10 steps one is skipped, and the first is the script's own: it makes the state.
    assert (found["optimizer"]["state"], found["optimizer"]["counts"]["steps"]) == ("applied", 8)
    # The device's memory, of which this takes little, and not the process's.
    assert 0 < report(only_run_dir())["stats"]["peak_memory_bytes"] < 2**20


def test_fp16_is_refused_for_a_chip_that_saturates(fasttrain: Any, script: Any, npus: Any) -> None:
    done = fasttrain("run", "--amp", "fp16", script(text(PLAIN)), env=npus("910a_24.1"))
    assert done.returncode == 78
    assert b"[amp-fp16]" in done.stderr


def test_fp16_is_refused_where_torch_npu_says_that_the_chip_saturates(
    fasttrain: Any, script: Any, npus: Any
) -> None:
    environ = {**npus(), "FAKE_NPU_NAME": "Ascend910A"}
    done = fasttrain("run", "--amp", "fp16", script(text(PLAIN)), env=environ)
    assert done.returncode == 78
    assert b"[amp-fp16]" in done.stderr


@pytest.mark.parametrize("scaler", [TORCHS, "torch.npu.amp.GradScaler()"])
def test_a_script_with_a_scaler_of_its_own_keeps_it(
    fasttrain: Any, script: Any, npus: Any, only_run_dir: Any, scaler: str
) -> None:
    loop = text(BY_HAND, scaler=scaler)
    printed(fasttrain("run", "--amp", "fp16", script(loop), env=npus()))
    found = outcomes(only_run_dir())
    assert {name: found[name]["state"] for name in ("amp", "loss_scaling")} == {
        "amp": "ceded",
        "loss_scaling": "ceded",
    }


def test_two_ranks_train_as_one_over_hccl(
    fasttrain: Any, script: Any, npus: Any, tmp_path: Path, only_run_dir: Any
) -> None:
    environ = {**npus(), "FAKE_HCCL_LOG": str(tmp_path / "hccl")}
    path = script(text(PLAIN, overflows=False) + VISIBLE)
    one = fasttrain("run", "--amp", "off", "--gpus", "1", path, "--run-dir", "one", env=environ)
    two = fasttrain("run", "--amp", "off", "--gpus", "0,1", "--strategy", "ddp", path, env=environ)
    losses = [[float(line) for line in printed(done)[:-2]] for done in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    run_dir = only_run_dir()
    found = outcomes(run_dir)
    assert (found["strategy"]["state"], found["optimizer"]["state"]) == ("applied", "applied")
    for rank in (0, 1):
        assert f"\n{rank} of 1\n" in (run_dir / f"rank-{rank}.log").read_text()
    log = tmp_path / "hccl"  # of a simulation that isn't installed: rank 1 writes its own copy
    copy = run_dir / "rank-1.files" / str(log).lstrip("/")
    ranks = [*log.read_text().split(), *copy.read_text().split()]
    assert ranks.count("0") == ranks.count("1") > 10  # a step each, at least


LARGE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(6)
x, y = torch.randn(96, 3, 210, 210), torch.randn(96, 1)
model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 210 * 210, 2), nn.Linear(2, 1)).to("npu")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for epoch in range(2):
    for inputs, wanted in DataLoader(TensorDataset(x, y), batch_size=8 + epoch):
        inputs = inputs.to("npu", non_blocking=True).mul(0.5)
        bright = inputs.to("npu")
        loss = (model(inputs) - wanted.npu()).square().mean()
        if epoch:
            loss = loss * x[:9].npu().mean().exp()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item(), tuple(inputs.shape), inputs.device)
print(inputs.mean().item())
"""


def test_two_ranks_move_the_rows_that_they_need(
    fasttrain: Any, script: Any, npus: Any, only_run_dir: Any
) -> None:
    path, environ = script(LARGE), npus()
    one = fasttrain("run", "--amp", "off", "--gpus", "1", path, "--run-dir", "one", env=environ)
    two = fasttrain("run", "--amp", "off", "--gpus", "0,1", "--strategy", "ddp", path, env=environ)
    alone, ranks = printed(one), printed(two)
    assert [line.split()[1:] for line in ranks] == [line.split()[1:] for line in alone]
    losses = [[float(line.split()[0]) for line in lines] for lines in (alone, ranks)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    counts = outcomes(only_run_dir())["strategy"]["counts"]
    # 11 and 10 batches of a million numbers behind the first; rows that are needed whole four times
    assert counts["moved by rows"] == 11 + 10 + 4


def test_two_ranks_skip_the_step_that_overflows_on_one(
    fasttrain: Any, script: Any, npus: Any, only_run_dir: Any
) -> None:
    path = script(text(PLAIN))
    printed(fasttrain("run", "--amp", "fp16", "--gpus", "0,1", "--strategy", "ddp", path,
                      env=npus()))  # fmt: skip
    counts = [
        {
            lever: outcomes(only_run_dir(), rank)[lever]["counts"]
            for lever in ("loss_scaling", "optimizer")
        }
        for rank in (0, 1)
    ]
    assert counts[0] == counts[1]
    # A rank's gradients are of fewer samples and so larger: others than that one may overflow.
    skipped = counts[0]["loss_scaling"]["skipped steps"]
    assert skipped >= 1
    assert counts[0]["optimizer"]["steps"] == 9 - skipped


def test_a_model_that_fails_to_compile_runs_uncompiled(
    fasttrain: Any, script: Any, npus: Any, only_run_dir: Any
) -> None:
    path, environ = script(text(PLAIN, overflows=False)), npus()
    environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of processes for one failure
    words = ("run", "--amp", "off", "--compile", "default", path)
    refused = fasttrain(*words, env=environ)
    assert (refused.returncode, b"[compile-npu]" in refused.stderr) == (69, True)
    pretend_triton(environ)
    eager = fasttrain("run", "--amp", "off", "--run-dir", "eager", path, env=environ)
    assert printed(fasttrain(*words, env=environ)) == printed(eager)
    found = outcomes(only_run_dir())["compile"]
    assert found["state"] == "failed"
