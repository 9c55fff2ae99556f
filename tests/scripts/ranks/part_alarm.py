"""An interval timer's signal sets a flag, by which the loop ends, and handles a call of its own."""
import signal

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(60, 8)
net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
rang = []
signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.03, 0.01)
for step in range(400):
    loss = net(x[step % 40 : step % 40 + 16]).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if len(rang) % 3 == 1:
        with torch.no_grad():
            net(x).mean().item()
    if len(rang) > 10:
        break
signal.setitimer(signal.ITIMER_REAL, 0)
print("done")
torch.save(net.state_dict(), "model.pt")
