"""forward gives the mean over the batch of what it computes, and a correlation matrix of features."""
import torch
from torch import nn


class Summary(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, x):
        h = self.net(x)
        return h.mean(0), torch.corrcoef(h.T), h.std()


torch.manual_seed(5)
x = torch.randn(48, 4)
net = Summary()
opt = torch.optim.SGD(net.parameters(), lr=0.2)
for step in range(9):
    batch = x[torch.randperm(48)[: 8 + 2 * (step % 2)]]
    mean, correlation, std = net(batch)
    off = correlation.triu(1).pow(2).sum()
    loss = (mean - torch.tensor([0.1, 0.2, 0.3, 0.4])).pow(2).sum() + 0.1 * off - 0.1 * std
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"loss {loss.item():.6g} off {off.item():.6g} std {std.item():.6g} mean", *(f"{m:.6g}" for m in mean.tolist()))
torch.save(net.state_dict(), "model.pt")
