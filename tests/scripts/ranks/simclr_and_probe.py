"""SimCLR with two views in one call, then a linear probe on frozen features."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(137)
x = torch.randn(40, 8)
y = (x[:, 0] * 2 + x[:, 1]).gt(0).long()
backbone, projector = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 4)
temperature = nn.Parameter(torch.tensor(0.5))
opt = torch.optim.Adam([*backbone.parameters(), *projector.parameters(), temperature], lr=0.01)
for rows in torch.randperm(40).split(9):
    views = torch.cat([x[rows] * (torch.rand(len(rows), 8) > 0.2) for _ in range(2)])
    n = len(rows)
    z = F.normalize(projector(backbone(views)), dim=1)
    similar = (z @ z.T / temperature).fill_diagonal_(float("-inf"))
    partner = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    loss = F.cross_entropy(similar, partner)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"loss {loss.item():.6g} top {(similar.argmax(1) == partner).float().mean():.6g} "
          f"t {temperature.item():.6g} gt {temperature.grad.item():.6g}")
backbone.requires_grad_(False)
probe = nn.Linear(16, 2)
opt = torch.optim.SGD(probe.parameters(), lr=0.3)
for epoch in range(4):
    out = probe(backbone(x))
    loss = F.cross_entropy(out, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    recall = [(out.argmax(1)[y == c] == c).float().mean().item() for c in (0, 1)]
    print(f"probe {loss.item():.6g} recall {recall[0]:.6g} {recall[1]:.6g}")
torch.save([backbone.state_dict(), probe.state_dict(), temperature.data], "model.pt")
