"""A thread fills a queue with batches while the main thread trains."""
import queue
import threading

import torch
from torch import nn

STOP = object()


def producer(q, n, seed):
    gen = torch.Generator().manual_seed(seed)
    for _ in range(n):
        x = torch.randn(8, 5, generator=gen)
        q.put((x, x.sum(1).gt(0).float()))
    q.put(STOP)


torch.manual_seed(18)
model = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 1))
optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
q = queue.Queue(maxsize=2)
thread = threading.Thread(target=producer, args=(q, 6, 180), daemon=True)
thread.start()
while (item := q.get()) is not STOP:
    x, y = item
    loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
thread.join()
