"""A pipeline by hand: all micro-batches forward first, then backward stage by stage from detached inputs."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(95)
stages = [
    nn.Sequential(nn.Linear(8, 24), nn.ReLU()),
    nn.Sequential(nn.Linear(24, 24), nn.ReLU()),
    nn.Linear(24, 3),
]
opts = [torch.optim.SGD(stage.parameters(), lr=0.05, momentum=0.9) for stage in stages]
x, y = torch.randn(128, 8), torch.randint(3, (128,))
for step in range(9):
    rows = torch.randperm(128)[:32]
    total, waiting = 0.0, []
    for h, labels in zip(x[rows].chunk(4), y[rows].chunk(4)):
        given, taken = [], []
        for stage in stages:
            h = h.detach().requires_grad_()
            taken.append(h)
            h = stage(h)
            given.append(h)
        waiting.append((taken, given, labels))
    for taken, given, labels in reversed(waiting):
        loss = F.cross_entropy(given[-1], labels) / 4
        total += loss.item()
        loss.backward()
        for before, after in zip(reversed(given[:-1]), reversed(taken[1:])):
            torch.autograd.backward(before, after.grad)
    for opt in opts:
        opt.step()
        opt.zero_grad()
    print(f"loss {total:.6g}")
torch.save([stage.state_dict() for stage in stages], "model.pt")
