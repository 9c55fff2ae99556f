"""Hooks send activations to NumPy for statistics."""
import numpy as np
import torch
from torch import nn

torch.manual_seed(20)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
stats = []
model[1].register_forward_hook(lambda m, i, o: stats.append(np.abs(o.detach().float().numpy()).mean()))
optimizer = torch.optim.Adam(model.parameters())
x = torch.from_numpy(np.random.RandomState(20).randn(10, 4).astype(np.float32))
y = torch.from_numpy(np.cos(x.numpy().sum(1, keepdims=True)))
for step in range(6):
    optimizer.zero_grad()
    loss = torch.mean((model(x) - y) ** 2)
    loss.backward()
    optimizer.step()
    print(step, float(loss).hex())
print(float(np.mean(stats)).hex())
