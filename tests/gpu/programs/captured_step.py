# ruff: noqa: T201
"""Captures a whole step in a CUDA graph, as in "Whole-network capture" of torch's CUDA notes.

Source: https://docs.pytorch.org/docs/2.13/notes/cuda.html#whole-network-capture
"""

import time

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
x = torch.randn(32, 64, device="cuda")


def step():
    optimizer.zero_grad(set_to_none=True)
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
    time.sleep(0.6)  # so that figures are due at the next step, which is the captured one
torch.cuda.current_stream().wait_stream(side)

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = step()
for _ in range(5):
    graph.replay()
print(f"{loss.item():.9g}")
