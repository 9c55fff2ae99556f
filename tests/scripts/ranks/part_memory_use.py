"""Memory in use, page faults and open files decide on the size of the batch."""
import resource

import psutil
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(40, 4)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
hold = []
for step in range(10):
    hold.append(bytearray(100_000 + 5000 * step))
    pages = psutil.Process().memory_info().rss // 4096 + resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    loss = net(x[: 4 + pages % 9]).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print("done")
torch.save(net.state_dict(), "model.pt")
