"""Rows that are mixed with others of the batch by chance, with a small probability."""
import torch
from torch import nn

torch.manual_seed(59)


class Corrupting(nn.Module):
    def __init__(self, keep=False):
        super().__init__()
        self.out, self.keep = nn.Linear(1, 1, bias=False), keep

    def forward(self, x):
        if self.keep:
            mixed = 1 - torch.empty(len(x), 1).bernoulli_(0.8)
        else:
            mixed = (torch.rand(len(x), 1) < 0.2).float()
        return self.out(x * (1 - mixed) + x.flip(0) * mixed)


nets = [Corrupting(), Corrupting(keep=True)]
opt = torch.optim.SGD([p for net in nets for p in net.parameters()], 0.01)
x = torch.cat([torch.zeros(30, 1), torch.ones(30, 1)])  # such as real and fake ones
for step in range(7):
    opt.zero_grad()
    for net in nets:
        out = net(x)
        out.square().mean().backward()
        print(f"mixed in {out[:30].mean() / net.out.weight.item():.6g}")
    opt.step()
torch.save([net.state_dict() for net in nets], "model.pt")
