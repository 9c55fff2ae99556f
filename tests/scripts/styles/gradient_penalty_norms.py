"""Penalizes the gradient norm of the loss itself: double backward through all weights."""
import torch
from torch import nn

torch.manual_seed(87)
model = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(14, 4), torch.randint(2, (14,))
for step in range(5):
    loss = nn.functional.cross_entropy(model(x), y)
    grads = torch.autograd.grad(loss, model.parameters(), create_graph=True)
    penalty = sum(g.pow(2).sum() for g in grads)
    optimizer.zero_grad()
    (loss + 0.1 * penalty).backward()
    optimizer.step()
    print(step, loss.item().hex(), penalty.item().hex())
