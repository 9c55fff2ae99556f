"""A thread trains, and the main thread evaluates the same model until it has ended."""
import threading

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 6)
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
over = threading.Event()


def train():
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(30):
        loss = net(x[step : step + 9]).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    over.set()


thread = threading.Thread(target=train)
thread.start()
looks = 0
while not over.is_set():
    with torch.no_grad():
        net(x).mean().item()
    looks += 1
thread.join()
print("done", looks > 0)
torch.save(net.state_dict(), "model.pt")
