"""Names its files by its process id, decides by whether it has changed, and signals itself by it."""
import multiprocessing
import os
import signal

import torch
from torch import nn



def end_itself():
    os.kill(os.getpid(), signal.SIGTERM)


torch.manual_seed(0)
child = multiprocessing.get_context("fork").Process(target=end_itself)
child.start()
child.join()
print("child", child.exitcode)
signals = []
signal.signal(signal.SIGUSR1, lambda *_: signals.append(1))
begun = os.getpid()
x = torch.randn(32, 4)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
folder = f"run-{begun}"
os.mkdir(folder)
for step in range(8):
    loss = net(x[step : step + 8]).pow(2).mean()
    if os.getpid() != begun:
        loss = loss + net(x[:5]).abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    torch.save(net.state_dict(), f"{folder}/{step}.part")
    os.replace(f"{folder}/{step}.part", f"{folder}/{step}.pt")
    os.kill(os.getpid(), signal.SIGUSR1)
    print(step, f"{loss.item():.6f}", len(signals), sorted(os.listdir(folder)))
for step in range(8):
    assert torch.load(os.path.join(folder, f"{step}.pt"))
    os.remove(f"{folder}/{step}.pt")
os.rmdir(folder)
torch.save(net.state_dict(), "model.pt")
