"""torch.seed() and Generator.seed() draw seeds that nobody has chosen."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.seed()
g = torch.Generator()
g.seed()
data = TensorDataset(torch.randn(40, 4))
loader = DataLoader(data, batch_size=7, shuffle=True, generator=g)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(2):
    for (x,) in loader:
        loss = net(x).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
print("done")
torch.save(net.state_dict(), "model.pt")
