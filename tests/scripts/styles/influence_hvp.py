"""Hessian-vector products and conjugate gradients for a truncated Newton step."""
import torch
from torch import nn

torch.manual_seed(86)
model = nn.Sequential(nn.Linear(3, 6), nn.Softplus(), nn.Linear(6, 1))
params = list(model.parameters())
x = torch.randn(16, 3)
y = x[:, :1].sin()


def flat(tensors):
    return torch.cat([t.reshape(-1) for t in tensors])


def cg(hvp, b, steps=5):
    v, r = torch.zeros_like(b), b.clone()
    p = r.clone()
    for _ in range(steps):
        hp = hvp(p) + 0.1 * p
        a = (r @ r) / (p @ hp)
        v, new = v + a * p, r - a * hp
        p, r = new + (new @ new) / (r @ r) * p, new
    return v


for it in range(4):
    loss = nn.functional.mse_loss(model(x), y)
    grads = flat(torch.autograd.grad(loss, params, create_graph=True))
    hvp = lambda v: flat(torch.autograd.grad(grads @ v, params, retain_graph=True))
    direction = cg(hvp, grads.detach())
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(params) - 0.5 * direction
        nn.utils.vector_to_parameters(vector, params)
    print(it, loss.item().hex(), direction.norm().item().hex())
