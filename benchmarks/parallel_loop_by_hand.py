"""The training of parallel_loop.py, made data-parallel by hand as in torch's tutorial.

python parallel_loop_by_hand.py TASK train FILE
"""

import itertools
import os
import sys
import time
from collections.abc import Iterator

import torch
from parallel_loop import READ_EVERY
from parallel_tasks import build_task
from synchronised_norm import synchronise
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

distributed.init_process_group("gloo")
rank, ranks = distributed.get_rank(), distributed.get_world_size()


class Cut(BatchSampler):
    """Yields the indices of a rank's part of each batch."""

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of one batch after the other."""
        for indices in super().__iter__():
            each = len(indices) // ranks
            yield indices[rank * each : (rank + 1) * each]


name, _, path = sys.argv[1:]
task = build_task(name)
data = TensorDataset(task.inputs, task.targets)
loader = DataLoader(data, batch_sampler=Cut(RandomSampler(data), task.batch, drop_last=False))
model = DistributedDataParallel(synchronise(task.model), broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
steps = itertools.count(1)
with open(path if rank == 0 else os.devnull, "w") as file:  # noqa: PTH123
    while True:
        for x, y in loader:
            loss = task.loss(model, x, y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if next(steps) % READ_EVERY == 0:
                whole = loss.detach() / ranks
                distributed.all_reduce(whole)
                print("loss", whole.item(), file=file, flush=True)
            print(time.monotonic(), time.process_time(), file=file)
