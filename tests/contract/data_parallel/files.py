# ruff: noqa: T201, PTH103, PTH105, PTH107, PTH123
"""Leaves files behind in a usual way, which the first argument names, and reads some of them."""

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(9)
x, y = torch.randn(40, 5), torch.randn(40, 1)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def training():
    for step, (inputs, wanted) in enumerate(DataLoader(TensorDataset(x, y), batch_size=8)):
        loss = functional.mse_loss(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}")
        yield step, loss.item()


def checkpoints():
    """By path, in place of another by renaming, and into an open file; each is loaded again."""
    os.makedirs("checkpoints/by/step", exist_ok=True)
    for step, _ in training():
        path = f"checkpoints/by/step/{step}.pt"
        torch.save({"step": step, "model": model.state_dict()}, path)
        print("loaded step", torch.load(path)["step"])
        torch.save({"step": step, "model": model.state_dict()}, "last.pt.tmp")
        os.replace("last.pt.tmp", "last.pt")
        print("loaded step", torch.load("last.pt")["step"])
        with open("opened.pt", "wb") as file:
            torch.save({"step": step, "model": model.state_dict()}, file)
        with open("opened.pt", "rb") as file:
            print("loaded step", torch.load(file)["step"])


def logs():
    """Text that is written at once, appended to, made anew, and read again."""
    Path("logs").mkdir(exist_ok=True)
    with open("log.csv", "a") as log:
        log.write("step,loss\n")
    for step, loss in training():
        with open("log.csv", "a") as log:
            log.write(f"{step},{loss:.5f}\n")
        Path("logs/state.json").write_text(json.dumps({"step": step}))
        print("state", json.loads(Path("logs/state.json").read_text()))
    with open("log.csv") as log:
        print("lines", len(log.readlines()))
    with open("new.txt", "x") as file:
        print("made once", file=file)


def rotation():
    """The last two checkpoints are kept, and a copy of the best one."""
    for step, _ in training():
        torch.save(model.state_dict(), f"{step}.pt")
        shutil.copyfile(f"{step}.pt", "best.pt")
        if step >= 2:
            os.remove(f"{step - 2}.pt")


def temporary():
    """A directory whose name is drawn: what is saved there is loaded again."""
    for step, _ in training():
        with tempfile.TemporaryDirectory() as scratch:
            torch.save({"step": step, "model": model.state_dict()}, f"{scratch}/model.pt")
            print("loaded step", torch.load(f"{scratch}/model.pt")["step"])


def late_directory():
    """A directory that rank 0 is the last one to make, where there are ranks."""
    # What the process was started with: the variables themselves are hidden from the script.
    if "RANK=0" in Path("/proc/self/environ").read_text().split("\0"):
        time.sleep(2)
    os.makedirs("out/here")
    for _ in training():
        torch.save(model.state_dict(), "out/here/last.pt")


globals()[sys.argv[1]]()
torch.save(model.state_dict(), "model.pt")
