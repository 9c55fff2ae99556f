"""The same loop as parallel_loop.py, made data-parallel by hand after torch's tutorial."""

import sys
import time

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

steps, path, batch, width = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
distributed.init_process_group("gloo")
rank, ranks = distributed.get_rank(), distributed.get_world_size()


class Cut(BatchSampler):
    """Gives a rank its part of each batch."""

    def __iter__(self):
        """Give the indices of one batch after the other."""
        for indices in super().__iter__():
            each = len(indices) // ranks
            yield indices[rank * each : (rank + 1) * each]


torch.manual_seed(0)
data = TensorDataset(torch.randn(batch * 16, width), torch.randint(0, 10, (batch * 16,)))
loader = DataLoader(data, batch_sampler=Cut(RandomSampler(data), batch, drop_last=False))
model = nn.Sequential(
    nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10)
)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
ends = []
while len(ends) < steps:
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        whole = loss.detach() / ranks
        distributed.all_reduce(whole)
        ends.append(time.monotonic())
whole = loss.detach() / ranks
distributed.all_reduce(whole)
if rank == 0:
    with open(path, "w") as file:  # noqa: PTH123
        file.write("\n".join(map(str, ends)))
    print(f"loss {whole.item():.9g}", flush=True)
distributed.destroy_process_group()
