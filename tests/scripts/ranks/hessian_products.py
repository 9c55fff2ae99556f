"""Backward with create_graph, a Hessian-vector product in the loss, Hutchinson's trace as a print."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(10)
x, t = torch.randn(24, 3), torch.randn(24, 1)
net = nn.Sequential(nn.Linear(3, 6), nn.Softplus(), nn.Linear(6, 1))
params = list(net.parameters())
opt = torch.optim.SGD(params, lr=0.05)
for step in range(6):
    rows = torch.randperm(24)[: 8 + step % 2]
    loss = F.huber_loss(net(x[rows]), t[rows])
    grads = torch.autograd.grad(loss, params, create_graph=True)
    v = [torch.randint_like(p, 2) * 2 - 1 for p in params]
    hv = torch.autograd.grad(sum((g * u).sum() for g, u in zip(grads, v)), params, create_graph=True)
    trace = sum((h * u).sum() for h, u in zip(hv, v))
    norm = torch.cat([g.flatten() for g in grads]).norm()
    opt.zero_grad()
    (loss + 0.01 * norm + 0.001 * trace.abs()).backward()
    opt.step()
    print(f"loss {loss.item():.6g} norm {norm.item():.6g} trace {trace.item():.6g}")
loss = net(x).pow(2).mean()
loss.backward(create_graph=True)
second = torch.autograd.grad(params[0].grad.pow(2).sum(), params[0])[0]
print(f"second {second.norm().item():.6g}")
for p in params:
    p.grad = None
torch.save(net.state_dict(), "model.pt")
