"""Several tasks, weighted by learned log variances (Kendall and Gal)."""
import torch
from torch import nn


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 24), nn.CELU())
        self.heads = nn.ModuleDict({"depth": nn.Linear(24, 1), "label": nn.Linear(24, 5), "flag": nn.Linear(24, 1)})

    def forward(self, x):
        h = self.trunk(x)
        return {name: head(h) for name, head in self.heads.items()}


torch.manual_seed(61)
model = MultiTask()
log_vars = nn.Parameter(torch.zeros(3))
optimizer = torch.optim.Adam([{"params": model.parameters()}, {"params": [log_vars], "lr": 1e-1}], lr=5e-3)
x = torch.randn(20, 6)
targets = {"depth": x[:, :1].abs(), "label": x[:, :5].argmax(1), "flag": (x[:, 5:] > 0).float()}
losses = {"depth": nn.L1Loss(), "label": nn.CrossEntropyLoss(), "flag": nn.BCEWithLogitsLoss()}
for step in range(6):
    out = model(x)
    each = torch.stack([losses[k](out[k], targets[k]) for k in losses])
    loss = (torch.exp(-log_vars) * each + log_vars).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), *(v.hex() for v in log_vars.tolist()))
