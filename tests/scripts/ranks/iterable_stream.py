"""IterableDataset without a length, a collate function, batches by the sum of lengths."""
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        rng = random.Random(5)
        for _ in range(41):
            n = rng.randint(2, 7)
            values = [rng.gauss(0, 1) for _ in range(n)]
            yield values, int(sum(values) > 0)


def collate(samples):
    longest = max(len(v) for v, _ in samples)
    x = torch.tensor([v + [0.0] * (longest - len(v)) for v, _ in samples])
    return {"x": x[..., None], "n": [len(v) for v, _ in samples], "y": torch.tensor([y for _, y in samples])}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRU(1, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, batch):
        h, _ = self.cell(batch["x"])
        return self.out(h[range(len(batch["n"])), [n - 1 for n in batch["n"]]])


torch.manual_seed(0)
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=0.03)
hits = tokens = 0
for batch in DataLoader(Stream(), batch_size=6, collate_fn=collate):
    out = net(batch)
    loss = F.cross_entropy(out, batch["y"])
    opt.zero_grad()
    loss.backward()
    opt.step()
    hits, tokens = hits + (out.argmax(1) == batch["y"]).sum().item(), tokens + sum(batch["n"])
    print(f"loss {loss.item():.6g} hits {hits} tokens {tokens} longest {batch['x'].size(1)}")
torch.save(net.state_dict(), "model.pt")
