"""SGD with momentum written out with torch._foreach functions."""
import torch
from torch import nn

torch.manual_seed(13)
net = nn.Sequential(nn.Linear(3, 9), nn.Sigmoid(), nn.Linear(9, 1))
params = list(net.parameters())
velocity = [torch.zeros_like(p) for p in params]
x = torch.rand(30, 3)
y = x.norm(dim=1, keepdim=True)
for step in range(8):
    loss = (net(x) - y).square().mean()
    grads = torch.autograd.grad(loss, params)
    with torch.no_grad():
        torch._foreach_mul_(velocity, 0.9)
        torch._foreach_add_(velocity, grads)
        torch._foreach_add_(params, velocity, alpha=-0.05)
    print(step, loss.item().hex())
