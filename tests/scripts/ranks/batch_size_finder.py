"""Doubles the batch until the model raises an error, then looks closer, and trains with what it found."""
import torch
import torch.nn.functional as F
from torch import nn


class Hungry(nn.Module):
    def __init__(self, limit):
        super().__init__()
        self.net, self.limit = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 2)), limit

    def forward(self, x):
        if len(x) > self.limit:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.net(x)


torch.manual_seed(94)
net = Hungry(40)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
x, y = torch.randn(256, 6), torch.randint(2, (256,))
size, step = 4, None
while step != 0:
    tried = 2 * size if step is None else size + step
    try:
        F.cross_entropy(net(x[:tried]), y[:tried]).backward()
        net.zero_grad()
        size = tried
    except RuntimeError as error:
        print(f"{tried} rows: {str(error)[:19]}")
        step = size // 4 if step is None else step // 2
print(f"batch {size}")
for _ in range(8):
    rows = torch.randint(256, (size,))
    loss = F.cross_entropy(net(x[rows]), y[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"loss {loss.item():.6g}")
torch.save(net.state_dict(), "model.pt")
