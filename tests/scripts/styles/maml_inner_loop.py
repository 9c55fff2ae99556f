"""MAML with explicit fast weights and second-order gradients."""
import torch
import torch.nn.functional as F

torch.manual_seed(16)
shapes = [(12, 1), (12,), (1, 12), (1,)]
theta = [torch.nn.Parameter(torch.randn(*s) * 0.5) for s in shapes]
meta_opt = torch.optim.Adam(theta, lr=5e-3)


def forward(x, weights):
    w1, b1, w2, b2 = weights
    return F.linear(torch.sin(F.linear(x, w1, b1)), w2, b2)


def adapt(weights, x, y, steps=2, lr=0.05):
    for _ in range(steps):
        grads = torch.autograd.grad(F.mse_loss(forward(x, weights), y), weights, create_graph=True)
        weights = [w - lr * g for w, g in zip(weights, grads)]
    return weights


for it in range(5):
    meta_opt.zero_grad()
    outer = 0
    for task in range(3):
        phase = torch.rand(1) * 3
        xs, xq = torch.rand(2, 8, 1) * 4 - 2
        fast = adapt(theta, xs, torch.sin(xs + phase))
        outer = outer + F.mse_loss(forward(xq, fast), torch.sin(xq + phase))
    outer.backward()
    meta_opt.step()
    print(it, outer.item().hex())
