"""A model that has its argument require a gradient, which the script then asks for."""
import torch
from torch import nn


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        x.requires_grad_(True)
        return self.net(x)


torch.manual_seed(0)
field = Field()
opt = torch.optim.SGD(field.parameters(), lr=0.01)
for at in range(6):
    x = torch.rand(16, 1)
    u = field(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    loss = (slope + u).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"{at} {loss.item():.6g}")
torch.save(field.state_dict(), "model.pt")
