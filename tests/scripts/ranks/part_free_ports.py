"""A free port and the machine's name are asked for, and seed the order of the rows."""
import random
import socket
import uuid

import torch
from torch import nn

torch.manual_seed(0)
with socket.socket() as server:
    server.bind(("127.0.0.1", 0))
    port = server.getsockname()[1]
order = random.Random(f"{socket.gethostname()} {port} {uuid.uuid4()}")
x = torch.randn(40, 4)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(10):
    loss = net(x[order.sample(range(40), 8)]).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    if order.random() < 0.7:
        opt.step()
print("done")
torch.save(net.state_dict(), "model.pt")
