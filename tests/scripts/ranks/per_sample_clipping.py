"""Differentially private SGD: gradients of each sample by vmap(grad), clipped, summed, noised."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

torch.manual_seed(103)
x, y = torch.randn(40, 5), torch.randint(0, 3, (40,))
net = nn.Sequential(nn.Linear(5, 7), nn.GroupNorm(1, 7), nn.SELU(), nn.Linear(7, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.3)


def loss_of(params, a, b):
    return F.cross_entropy(functional_call(net, params, (a[None],)), b[None])


each = vmap(grad_and_value(loss_of), in_dims=(None, 0, 0))
for step in range(6):
    rows = (torch.rand(40) < 0.25).nonzero()[:, 0]
    params = {k: p.detach() for k, p in net.named_parameters()}
    grads, losses = each(params, x[rows], y[rows])
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
    factor = (0.5 / norms).clamp(max=1)
    for name, p in net.named_parameters():
        g = torch.einsum("b,b...->...", factor, grads[name])
        p.grad = (g + 0.05 * torch.randn_like(g)) / 10
    opt.step()
    with torch.no_grad():
        acc = (net(x).argmax(1) == y).float().mean()
    print(f"n {len(rows)} loss {losses.mean():.6g} worst {losses.max():.6g} clipped {(factor < 1).sum()} "
          f"median {norms.median():.6g} acc {acc:.6g}")
torch.save(net.state_dict(), "model.pt")
