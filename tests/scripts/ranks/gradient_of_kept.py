"""Models that return their loss and keep their features: Grad-CAM, saliency, retained gradients."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(47)


class Net(nn.Module):
    def __init__(self, retain=False):
        super().__init__()
        self.a, self.b, self.retain = nn.Linear(6, 8), nn.Linear(8, 3), retain

    def forward(self, x, y):
        self.h = torch.tanh(self.a(x))
        if self.retain:
            self.h.retain_grad()
        return F.cross_entropy(self.b(self.h), y)


def by_grad(net, loss):
    (g,) = torch.autograd.grad(loss, net.h, retain_graph=True)
    loss.backward()
    return g


def retained(net, loss):
    net.h.retain_grad()
    loss.backward()
    return net.h.grad


def retained_inside(net, loss):
    loss.backward()
    return net.h.grad


nets = [Net(), Net(), Net(retain=True)]
opt = torch.optim.SGD([p for net in nets for p in net.parameters()], 0.1)
for step in range(6):
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    opt.zero_grad()
    for net, read in zip(nets, [by_grad, retained, retained_inside]):
        loss = net(x, y)
        g = read(net, loss)
        print(f"{read.__name__} loss {loss.item():.6g} rows {len(g)} g {g.norm():.6g}")
    opt.step()
torch.save([net.state_dict() for net in nets], "model.pt")
