"""Differentially private SGD: per-sample gradients, clipped, with noise."""
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

torch.manual_seed(15)
model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(12, 6), torch.randint(2, (12,))


def sample_loss(params, xi, yi):
    logits = functional_call(model, params, (xi[None],))
    return nn.functional.cross_entropy(logits, yi[None])


per_sample = vmap(grad(sample_loss), in_dims=(None, 0, 0))
for step in range(5):
    params = {k: p.detach() for k, p in model.named_parameters()}
    grads = per_sample(params, x, y)
    norms = torch.sqrt(sum(g.flatten(1).square().sum(1) for g in grads.values()))
    factor = (1.0 / norms).clamp(max=1.0)
    for name, p in model.named_parameters():
        g = torch.einsum("n,n...->...", factor, grads[name])
        p.grad = (g + 0.1 * torch.randn_like(g)) / len(x)
    optimizer.step()
    with torch.no_grad():
        print(step, nn.functional.cross_entropy(model(x), y).item().hex(), norms.max().item().hex())
