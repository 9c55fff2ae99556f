"""autograd.grad with is_grads_batched: Jacobians by input and by weight, one as a penalty."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(19)
x, t = torch.randn(24, 5), torch.randn(24, 3)
net = nn.Sequential(nn.Linear(5, 8), nn.Softplus(), nn.Linear(8, 3))
opt = torch.optim.Adam(net.parameters(), lr=0.02)
for step in range(6):
    rows = torch.arange(step, 24, 2)
    given = x[rows].requires_grad_()
    out = net(given)
    each = torch.eye(3)[:, None].expand(3, len(rows), 3)
    by_input, by_weight = torch.autograd.grad(
        out, (given, net[2].weight), each, create_graph=True, is_grads_batched=True
    )
    loss = F.mse_loss(out, t[rows]) + 0.1 * by_input.square().sum((0, 2)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    full = torch.autograd.functional.jacobian(net, x[:4], vectorize=True)
    print(f"{loss.item():.6g} {by_weight.norm().item():.6g} {full.norm().item():.6g}")
torch.save(net.state_dict(), "model.pt")
