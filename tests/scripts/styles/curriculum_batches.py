"""Batch size and difficulty change during training; the learning rate follows the batch."""
import torch
from torch import nn

torch.manual_seed(53)
model = nn.Sequential(nn.Linear(4, 16), nn.Hardswish(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
pool = torch.randn(64, 4)
pool = pool[pool.norm(dim=1).argsort()]
target = pool.norm(dim=1, keepdim=True)
for stage, (batch, portion) in enumerate([(4, 0.25), (8, 0.5), (16, 1.0), (3, 1.0)]):
    for group in optimizer.param_groups:
        group["lr"] = 0.002 * batch
    for _ in range(2):
        idx = torch.randint(int(len(pool) * portion), (batch,))
        loss = nn.functional.mse_loss(model(pool[idx]), target[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(stage, batch, loss.item().hex())
