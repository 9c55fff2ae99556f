"""MAML by functional_call with BatchNorm statistics of the batch, first order every other step."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

torch.manual_seed(61)
net = nn.Sequential(nn.Linear(3, 10), nn.BatchNorm1d(10, track_running_stats=False), nn.ReLU(), nn.Linear(10, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(6):
    total = torch.zeros(())
    hits = 0
    for task in range(2):
        w = torch.randn(3)
        x = torch.randn(16, 3)
        y = (x @ w > 0).long()
        params = dict(net.named_parameters())
        loss = F.cross_entropy(functional_call(net, params, (x[:8],)), y[:8])
        grads = torch.autograd.grad(loss, tuple(params.values()), create_graph=step % 2 == 0)
        params = {k: p - 0.3 * g for (k, p), g in zip(params.items(), grads)}
        out = functional_call(net, params, (x[8:],))
        total = total + F.cross_entropy(out, y[8:]) / 2
        hits += (out.argmax(1) == y[8:]).sum().item()
    opt.zero_grad()
    total.backward()
    opt.step()
    print(f"loss {total.item():.6g} hits {hits} g {net[0].weight.grad.norm():.6g} {net[3].bias.grad.norm():.6g}")
torch.save(net.state_dict(), "model.pt")
