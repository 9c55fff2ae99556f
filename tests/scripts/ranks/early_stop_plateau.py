"""Validation each epoch decides on the learning rate, on the best weights and on the end."""
import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(14)
x = torch.randn(60, 5)
data = TensorDataset(x, x.sin().sum(1, keepdim=True) + 0.3 * torch.randn(60, 1))
train, val = random_split(data, [43, 17])
train_loader = DataLoader(train, batch_size=9, shuffle=True)
val_loader = DataLoader(val, batch_size=6)
net = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 1))
opt = torch.optim.Adam(net.parameters(), lr=0.1)
plan = ReduceLROnPlateau(opt, factor=0.3, patience=0)
best, waited, state = float("inf"), 0, None
for epoch in range(12):
    total = n = 0
    for a, b in train_loader:
        loss = F.mse_loss(net(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total, n = total + loss.item() * len(a), n + len(a)
    with torch.no_grad():
        worst = max((net(a) - b).abs().max().item() for a, b in val_loader)
        held = sum(F.mse_loss(net(a), b, reduction="sum").item() for a, b in val_loader) / len(val)
    plan.step(held)
    waited = 0 if held < best else waited + 1
    if held < best:
        best, state = held, copy.deepcopy(net.state_dict())
    print(f"{epoch} train {total / n:.6g} val {held:.6g} worst {worst:.6g} lr {opt.param_groups[0]['lr']:g}")
    if waited == 3:
        print("stopped")
        break
net.load_state_dict(state)
torch.save(net.state_dict(), "model.pt")
