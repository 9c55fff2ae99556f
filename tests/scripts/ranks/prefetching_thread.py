"""A thread makes the batches ahead into a queue, another evaluates a copy while training goes on."""
import copy
import queue
import threading

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(107)
x, y = torch.randn(44, 5), torch.randint(0, 3, (44,))
ahead = queue.Queue(3)


def produce():
    g = torch.Generator().manual_seed(4)
    for _ in range(2):
        for rows in torch.randperm(44, generator=g).split(9):
            ahead.put((x[rows] + 0.1 * torch.randn(len(rows), 5, generator=g), y[rows]))
    ahead.put(None)


def evaluate(net, into):
    with torch.no_grad():
        into.append(F.cross_entropy(net(x), y).item())


threading.Thread(target=produce, daemon=True).start()
net, evaluations, threads = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), [], []
opt = torch.optim.Adam(net.parameters(), lr=0.02)
step = 0
while (batch := ahead.get()) is not None:
    loss = F.cross_entropy(net(batch[0]), batch[1], reduction="sum") / len(batch[1])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"{step} loss {loss.item():.6g}")
    if step % 4 == 3:
        thread = threading.Thread(target=evaluate, args=(copy.deepcopy(net), evaluations))
        thread.start()
        threads.append(thread)
        if step > 4:
            threads.pop(0).join()
    step += 1
for thread in threads:
    thread.join()
print("evaluations", *(f"{e:.6g}" for e in sorted(evaluations)))
torch.save(net.state_dict(), "model.pt")
