"""Tell which ring of the plane a point lies in."""

import torch
import torch.nn as nn

from by_hand import autocast, scaler

torch.manual_seed(0)
x = torch.randn(480, 2) * 2
x[160] *= 1000  # raw data has such points
y = x.norm(dim=1).div(1.5).long().clamp(max=3)

model = nn.Sequential(
    nn.Linear(2, 32), nn.ReLU(),
    nn.Linear(32, 32), nn.ReLU(),
    nn.Linear(32, 4),
)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

for epoch in range(3):
    order = torch.randperm(480)
    for batch in order.split(48):
        optimizer.zero_grad()
        with autocast():
            output = model(x[batch])
        loss = criterion(output.float(), y[batch])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    scheduler.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}, lr {scheduler.get_last_lr()[0]:g}")

print(f"final loss {loss.item():.9g}")
scaler.report()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")
