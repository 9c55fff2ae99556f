"""Stochastic weight averaging, as torch's own page on it has it."""
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

g = torch.Generator().manual_seed(8)
x = torch.randn(128, 10, generator=g)
y = (x[:, :1] * x[:, 1:2]).sign()
x[64] = 20000.0
loader = DataLoader(TensorDataset(x, y), batch_size=16)

torch.manual_seed(8)
model = nn.Sequential(nn.Linear(10, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_fn = nn.SoftMarginLoss()
swa_model = AveragedModel(model)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
swa_start = 2
swa_scheduler = SWALR(optimizer, swa_lr=0.05)

for epoch in range(4):
    for input, target in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(input), target)
        loss.backward()
        optimizer.step()
    if epoch >= swa_start:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
    print(f"epoch {epoch} loss {loss.item():.6f}")

update_bn(loader, swa_model)
swa_model.eval()
with torch.no_grad():
    preds = swa_model(x)
print(f"averaged model's loss {loss_fn(preds, y).item():.9g}")
print(f"final loss {loss.item():.9g}")
torch.save({"model": model.state_dict(), "swa": swa_model.state_dict(),
            "optimizer": optimizer.state_dict()}, "model.pt")
