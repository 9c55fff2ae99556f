"""Trains a small model on one rank or several, until something happens to one of them.

``python trains.py WHAT PLACE RANK``: what happens, at which place of the loop, and to which rank;
``-`` where there is only one. All but ``start`` is in the third step, when the levers have acted.
"""

import ctypes
import math
import mmap
import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

WHAT, PLACE, RANK = sys.argv[1:]
STEPS, FAULTY_STEP, BATCH, LARGE = 100, 3, 4, 1 << 18
IN_WORKER = WHAT in ("loader killed", "loader raises", "shm full")
step = 0
# fasttrain hides the rank from a script that knows nothing of ranks, and this one must know.
started_with = Path("/proc/self/environ").read_bytes().split(b"\0")
faulty = RANK == "-" or f"RANK={RANK}".encode() in started_with


def wait():
    # Past Python: rank 0 alone makes the files of a split run.
    ctypes.CDLL(None).creat(b"here", 0o600)
    time.sleep(120)


def raises():
    raise ValueError("of the script")


def no_memory():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 36, resource.RLIM_INFINITY))
    bytearray(1 << 40)


def all_memory():
    held = []
    while True:
        held.append(b"x" * (32 << 20))


def cut_off():
    file = os.open("cut", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 8192)
    mapped = mmap.mmap(file, 8192)
    os.ftruncate(file, 0)
    mapped[4096]


FAULTS = {
    "raise": raises,
    "exit 7": lambda: sys.exit(7),
    "leave 9": lambda: os._exit(9),
    "SEGV": lambda: ctypes.string_at(0),
    "ABRT": os.abort,
    "BUS": cut_off,
    "KILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "no memory": no_memory,
    "all memory": all_memory,
    "no space": lambda: os.write(os.open("/dev/full", os.O_WRONLY), b"all of it"),
    "disk full": lambda: torch.save(torch.zeros(1 << 20), "disk/checkpoint.pt"),
    "wait": wait,
}


def at(place):
    due = place == "loader" or step in (0, FAULTY_STEP)  # a loader works for the step to come
    if faulty and due and place == PLACE and WHAT in FAULTS:
        FAULTS[WHAT]()


@torch.compiler.disable
def at_forward(tensor):
    at("forward")
    return spoiled("forward", tensor)


def spoiled(place, tensor):
    bad = WHAT == "nan" and faulty and place == PLACE and step >= FAULTY_STEP - 1
    return tensor * math.nan if bad else tensor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        x = self.first(x).relu()
        if PLACE == "forward":
            x = at_forward(x)
        return self.last(x)


class Data(Dataset):
    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, index):
        if index // BATCH != FAULTY_STEP - 1:
            return spoiled("loader", torch.ones(4))
        if IN_WORKER and faulty:
            return in_worker()
        at("loader")
        return torch.ones(4)


def in_worker():
    # A worker reads ahead, and the levers are to have acted.
    while not Path(f"stepped-{os.getppid()}").exists():
        time.sleep(0.01)
    if WHAT == "loader raises":
        raise KeyError("of the loader")
    if WHAT == "loader killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.zeros(LARGE)


class Checkpoint:
    def __reduce__(self):
        at("saving")
        return (Checkpoint, ())


def backward(loss):
    if PLACE == "backward":
        loss.register_hook(lambda gradient: at("backward") or spoiled("backward", gradient))
    loss.backward()


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: at("optimizer"))
    at("start")
    for step, x in enumerate(DataLoader(Data(), batch_size=BATCH, num_workers=int(IN_WORKER)), 1):
        optimizer.zero_grad()
        backward((model(x) - 3).square().mean())
        optimizer.step()
        if step == FAULTY_STEP - 1:
            os.close(os.open(f"stepped-{os.getpid()}", os.O_CREAT | os.O_WRONLY))
        if step == FAULTY_STEP:
            torch.save({"model": model.state_dict(), "at": Checkpoint()}, "checkpoint.pt")
