"""Recommendations: embeddings with biases, BPR loss on sampled negatives, Adagrad."""
import torch
from torch import nn


class MF(nn.Module):
    def __init__(self, users, items, k=6):
        super().__init__()
        self.u, self.i, self.b = nn.Embedding(users, k), nn.Embedding(items, k), nn.Embedding(items, 1)
        for e in (self.u, self.i):
            nn.init.normal_(e.weight, std=0.1)
        nn.init.zeros_(self.b.weight)

    def score(self, u, i):
        return (self.u(u) * self.i(i)).sum(-1) + self.b(i).squeeze(-1)


torch.manual_seed(99)
pairs = torch.stack([torch.randint(12, (60,)), torch.randint(20, (60,))], 1)
model = MF(12, 20)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, lr_decay=0.01)
for epoch in range(2):
    for batch in pairs[torch.randperm(60)].split(20):
        user, pos = batch.T
        neg = torch.randint(20, (len(batch),))
        loss = -nn.functional.logsigmoid(model.score(user, pos) - model.score(user, neg)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(epoch, loss.item().hex())
