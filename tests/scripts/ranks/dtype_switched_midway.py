"""The model turns to float64 and back in the middle of training, and its head is widened in place."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(93)
net = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 2))
x, y = torch.randn(60, 6), torch.randint(2, (60,))


def go(steps, dtype):
    opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
    for _ in range(steps):
        rows = torch.randperm(60)[:20]
        out = net(x[rows].to(dtype))
        loss = F.cross_entropy(out, y[rows] % out.size(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"{out.dtype} {tuple(out.shape)} loss {loss.item():.6g}")


go(6, torch.float32)
with torch.no_grad():
    print(f"exactly {net.double()(x.double()).sum().item():.6g}")
net.float()
go(5, torch.float32)
net.double()
go(6, torch.float64)
net.float()
go(5, torch.float32)
for p in net[2].parameters():
    p.data = torch.cat([p.data, p.data[:1] * 0.5])
    p.grad = None
y = y + torch.arange(60) % 2
go(6, torch.float32)
torch.save(net.state_dict(), "model.pt")
