"""Dropout and BatchNorm: only what does not depend on chance can be compared."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(211)
x, y = torch.randn(33, 6), torch.randint(0, 3, (33,))
net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(9):
    rows = slice(step * 3, step * 3 + 7)
    out = net(x[rows])
    loss = F.cross_entropy(out, y[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step} loss {loss.item():.6g} rows {len(out)} finite {bool(out.isfinite().all())}")
net.eval()
print(f"eval {net(x).norm().item():.6g} batches {net[1].num_batches_tracked.item()}")
torch.save(net.state_dict(), "model.pt")
