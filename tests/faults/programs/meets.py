"""Trains a small model on ranks of its own making; one of them comes late, or never.

``python meets.py WHAT PLACE RANK``: ``late``, and gloo gives up first, or ``wait``, and it doesn't;
at a collective of the script's own (``loop``), or at DistributedDataParallel's (``backward``).
"""

import datetime as dt
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WHAT, PLACE, RANK = sys.argv[1:]
FAULTY_STEP = 3
GIVES_UP = dt.timedelta(seconds=2 if WHAT == "late" else 100)


def at(place, step):
    if step == FAULTY_STEP and place == PLACE and os.environ["RANK"] == RANK:
        time.sleep(120)


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
dist.distributed_c10d._set_pg_timeout(GIVES_UP)  # only now: compiling takes its time
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1, 100):
    optimizer.zero_grad()
    loss = (model(torch.ones(4, 4)) - 3).square().mean()
    at("backward", step)
    loss.backward()
    optimizer.step()
    at("loop", step)
    dist.all_reduce(loss.detach())
