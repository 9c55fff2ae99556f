# ruff: noqa: T201
"""Steps of 10 ms and more on a GPU, timed by CUDA events, or by the clock on a CPU.

    python timed_steps.py DEVICE reads|ahead

With "reads" each step reads its loss, as most scripts do. With "ahead" none does, and Python runs
ahead of the GPU until the queue of launches is full.
"""

import itertools
import json
import statistics
import sys
import time

import torch
from torch import nn

WIDTH, ROWS = {"cuda": 4096, "cpu": 512}, {"cuda": 8192, "cpu": 512}
STEPS = {("cuda", "reads"): 60, ("cuda", "ahead"): 250, ("cpu", "reads"): 40, ("cpu", "ahead"): 40}
WARM_UP = 3


class Clock:
    """The time at which the device has come to a place in the program."""

    def __init__(self, device):
        self.event = torch.cuda.Event(enable_timing=True) if device == "cuda" else None
        if self.event:
            self.event.record()
        self.at_s = time.perf_counter()

    def until_s(self, later):
        if self.event:
            return self.event.elapsed_time(later.event) / 1e3
        return later.at_s - self.at_s


def main(device, how):
    torch.manual_seed(0)
    width = WIDTH[device]
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(ROWS[device], width, device=device)
    clocks = []
    for _ in range(STEPS[device, how]):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if how == "reads":
            loss.item()
        clocks.append(Clock(device))
    if device == "cuda":
        torch.cuda.synchronize()
    step_s = [a.until_s(b) for a, b in itertools.pairwise(clocks)][WARM_UP:]
    print(
        json.dumps(
            {"median_s": statistics.median(step_s), "total_s": clocks[0].until_s(clocks[-1])}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
