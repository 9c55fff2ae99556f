"""Matrix factorisation with sparse embeddings: SparseAdam for them, Adam for the dense rest."""

import torch
import torch.nn as nn

from by_hand import autocast, scaler

USERS, ITEMS, DIM = 50, 30, 8


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, DIM, sparse=True)
        self.item = nn.Embedding(ITEMS, DIM, sparse=True)
        self.mlp = nn.Sequential(nn.Linear(2 * DIM, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, users, items):
        return self.mlp(torch.cat([self.user(users), self.item(items)], dim=1)).squeeze(1)


torch.manual_seed(5)
model = Recommender()
sparse = [model.user.weight, model.item.weight]
dense = list(model.mlp.parameters())
optimizers = [torch.optim.SparseAdam(sparse, lr=1e-2), torch.optim.Adam(dense, lr=1e-2)]

for step in range(25):
    users, items = torch.randint(0, USERS, (32,)), torch.randint(0, ITEMS, (32,))
    ratings = ((users * 7 + items * 3) % 5 + 1).float()
    if step == 10:
        ratings[0] = 1e5
    with autocast():
        prediction = model(users, items)
    prediction = prediction.float()
    loss = nn.functional.mse_loss(prediction, ratings)
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    if step % 6 == 0:
        print(f"step {step}: {loss.item():.5f}")

print(f"final loss {loss.item():.9g}")
scaler.report()
torch.save([model.state_dict()] + [o.state_dict() for o in optimizers], "model.pt")
