"""New nn.Parameters in the places of a module's own: Reptile, first-order MAML, plain steps between."""
import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

torch.manual_seed(43)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.2)


def batch():
    return torch.randn(12, 4) + (torch.arange(12.0) > 5)[:, None], torch.randn(12, 1)


def reptile():
    x, y = batch()
    fast = copy.deepcopy(dict(net.named_parameters()))
    for _ in range(3):
        loss = F.mse_loss(functional_call(net, fast, (x,)), y)
        grads = torch.autograd.grad(loss, list(fast.values()))
        fast = {n: nn.Parameter((p - 0.3 * g).detach()) for (n, p), g in zip(fast.items(), grads)}
    with torch.no_grad():
        for n, p in net.named_parameters():
            p.lerp_(fast[n], 0.5)
    return loss


def first_order():
    x, y = batch()
    fast = {n: nn.Parameter(p.detach().clone()) for n, p in net.named_parameters()}
    F.mse_loss(functional_call(net, fast, (x,)), y).backward()
    fast = {n: nn.Parameter((p - 0.3 * p.grad).detach()) for n, p in fast.items()}
    loss = F.mse_loss(functional_call(net, fast, (x,)), y)
    for p, g in zip(net.parameters(), torch.autograd.grad(loss, list(fast.values()))):
        p.grad = g
    opt.step()
    opt.zero_grad()
    return loss


def plain():
    x, y = batch()
    loss = F.mse_loss(net(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


for act in [reptile, plain, plain, first_order, plain, plain, reptile, first_order, plain]:
    print(f"{act.__name__} {act().item():.6g}")
torch.save(net.state_dict(), "model.pt")
