"""torch.func: jacrev and jvp of the model as penalties, hessian for a print."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, hessian, jacrev, jvp, vmap

torch.manual_seed(43)
x, t = torch.randn(22, 3), torch.randn(22, 2)
net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
opt = torch.optim.Adam(net.parameters(), lr=0.02)


def f(row):
    return functional_call(net, dict(net.named_parameters()), (row[None],))[0]


for step in range(6):
    rows = torch.arange(step, 22, 3)
    fit = F.mse_loss(net(x[rows]), t[rows])
    jac = vmap(jacrev(f))(x[rows])
    _, slope = jvp(net, (x[rows],), (torch.ones_like(x[rows]),))
    loss = fit + 0.1 * jac.pow(2).sum((1, 2)).sqrt().mean() + 0.01 * slope.pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"fit {fit.item():.6g} jac {jac.norm().item():.6g} slope {slope.norm().item():.6g}")
curved = hessian(lambda v: f(v).sum())(x[0])
print(f"trace {curved.trace().item():.6g} symmetric {torch.allclose(curved, curved.T, atol=1e-5)}")
torch.save(net.state_dict(), "model.pt")
