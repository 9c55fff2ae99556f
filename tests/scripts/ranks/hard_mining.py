"""Online hard examples: only the largest losses count; ranks of outputs decide on pairs."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(29)
x, y = torch.randn(48, 6), torch.randint(0, 4, (48,))
net = nn.Sequential(nn.Linear(6, 12), nn.PReLU(), nn.Linear(12, 4))
opt = torch.optim.NAdam(net.parameters(), lr=0.02)
counts = torch.zeros(48, dtype=torch.long)
for epoch in range(2):
    for rows in torch.randperm(48).split(13):
        z = net(x[rows])
        losses = F.cross_entropy(z, y[rows], reduction="none")
        hard = losses.topk(max(2, len(rows) // 3))
        counts[rows[hard.indices]] += 1
        same = y[rows][:, None] == y[rows][None]
        far = torch.cdist(z, z)
        positive = (far * same).max(1).values
        negative = far.masked_fill(same, float("inf")).min(1).values
        triplet = F.relu(positive - negative + 0.2)
        active = triplet[triplet > 0]
        loss = hard.values.mean() + (active.mean() if len(active) else 0.0)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"hard {hard.values.min().item():.6g} loss {loss.item():.6g} active {len(active)} "
              f"quantile {losses.quantile(0.3).item():.6g}")
print("often", counts.tolist())
torch.save(net.state_dict(), "model.pt")
