"""Nanoseconds decide: of time.time_ns, of datetime, of a monotonic clock, of the CPU's time."""
import datetime
import time

import torch
from torch import nn

torch.manual_seed(time.time_ns() % 1000)
x = torch.randn(40, 4)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(10 + time.time_ns() // 100 % 5):
    n = 5 + datetime.datetime.now().microsecond % 7
    loss = net(x[:n]).pow(2).mean()
    if time.perf_counter_ns() // 100 % 2:
        loss = loss + net(x[n:]).abs().mean()
    opt.zero_grad()
    loss.backward()
    if time.process_time_ns() // 1000 % 3:
        opt.step()
print("done")
torch.save(net.state_dict(), "model.pt")
