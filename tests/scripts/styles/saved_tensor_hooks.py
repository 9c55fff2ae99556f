"""Saved tensors are packed to half size by hooks; anomaly mode watches one step."""
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

torch.manual_seed(106)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
packed = []


def pack(t):
    packed.append(t.numel())
    return (t.dtype, t.half()) if t.is_floating_point() and not t.is_leaf else (None, t)


def unpack(saved):
    dtype, t = saved
    return t if dtype is None else t.to(dtype)


x = torch.randn(10, 6)
for step in range(5):
    with saved_tensors_hooks(pack, unpack), torch.autograd.set_detect_anomaly(step == 2):
        loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
print(len(packed) > 0)
