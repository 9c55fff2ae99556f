"""Accumulates three micro-batches, reads .grad in between, and steps with what is left over."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1)
X, Y = torch.randn(35, 5), torch.randint(0, 3, (35,))
net = nn.Sequential(nn.Linear(5, 9), nn.ELU(), nn.Linear(9, 3))
opt = torch.optim.AdamW(net.parameters(), lr=0.02)
for epoch in range(2):
    seen = []
    for i, at in enumerate(torch.randperm(35).split(4), 1):
        out = net(X[at])
        loss = F.cross_entropy(out, Y[at]) / 3
        loss.backward()
        seen.append(net[0].weight.grad.norm().item())
        if i % 3 == 0 or len(at) < 4:
            total = sum(p.grad.pow(2).sum() for p in net.parameters()).sqrt()
            print(f"loss {loss:.6g} grad {total:.6g} partial", *(f"{s:.6g}" for s in seen))
            opt.step()
            opt.zero_grad(set_to_none=epoch == 0)
            seen.clear()
with torch.no_grad():
    print("accuracy", (net(X).argmax(1) == Y).float().mean().item())
torch.save(net.state_dict(), "model.pt")
