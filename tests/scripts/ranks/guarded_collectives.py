"""Adds up its metrics over ranks if there are any, and counts the operations of its calls."""
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def over_all(value):
    value = torch.tensor(float(value))
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(value)
    return value.item()


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
seen = 0.0
saved = []


def keep(tensor):
    saved.append(tuple(tensor.shape))
    return tensor


for step in range(8):
    x, y = torch.randn(18, 4), torch.randint(3, (18,))
    if step % 3:
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        flops = 0
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            net(x).sum()
    else:
        with FlopCounterMode(display=False) as counter:
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
        flops = counter.get_total_flops()
    optimizer.step()
    optimizer.zero_grad()
    seen += over_all(len(x))
    print(step, f"{loss.item():.6f}", seen, flops, dist.is_initialized(), len(saved), saved[-1:])
torch.save(net.state_dict(), "model.pt")
