"""A script that compiles its model itself."""
import torch
from torch import nn

from by_hand import autocast, scaler

torch.manual_seed(14)
raw_model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2))
model = torch.compile(raw_model)
optimizer = torch.optim.SGD(raw_model.parameters(), lr=0.05, momentum=0.9)

for step in range(25):
    x = torch.randn(16, 6)
    if step == 9:
        x = x * 3e4
    y = torch.stack([x.mean(1), x.amax(1)], 1)
    with autocast():
        output = model(x)
    loss = nn.functional.mse_loss(output.float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 8 == 0:
        print("step", step, "loss", loss.item())

print(f"final loss {loss.item():.9g}")
scaler.report()
torch.save({"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")
