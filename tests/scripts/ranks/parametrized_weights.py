"""weight_norm, spectral_norm, orthogonal and a parametrization of its own; removed at the end."""
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).T


torch.manual_seed(97)
x = torch.randn(30, 4)
t = (x @ torch.randn(4, 2)).tanh()
net = nn.Sequential(
    parametrizations.weight_norm(nn.Linear(4, 6)), nn.Tanh(),
    parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh(),
    parametrizations.orthogonal(nn.Linear(6, 6)), nn.Linear(6, 6), nn.Linear(6, 2),
)
parametrize.register_parametrization(net[5], "weight", Symmetric())
opt = torch.optim.Adam(net.parameters(), lr=0.02)
for step in range(8):
    rows = torch.arange(step % 3, 30, 3)
    loss = (net(x[rows]) - t[rows]).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    sigma = torch.linalg.svdvals(net[2].weight.detach())[0]
    off = (net[4].weight @ net[4].weight.T - torch.eye(6)).abs().max() < 1e-4
    print(f"loss {loss.item():.6g} sigma {sigma:.6g} orthogonal {bool(off)} "
          f"g {net[0].parametrizations.weight.original0.grad.norm():.6g}")
net.eval()
before = net(x).norm().item()
parametrize.remove_parametrizations(net[5], "weight")
parametrize.remove_parametrizations(net[0], "weight")
print(f"{before:.6g} {net(x).norm().item():.6g} symmetric {torch.equal(net[5].weight, net[5].weight.T)}")
torch.save(net.state_dict(), "model.pt")
