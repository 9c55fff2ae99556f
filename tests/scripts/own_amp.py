"""A script that has mixed precision of its own already."""
import torch
from torch import nn

torch.manual_seed(12)
device = "cpu"
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler(device)

for step in range(24):
    x = torch.randn(16, 10, device=device)
    y = x[:, :4].argmax(1)
    if step == 5:
        x = x * 1000
    optimizer.zero_grad()
    with torch.autocast(device_type=device, dtype=torch.float16):
        output = model(x)
        loss = nn.functional.cross_entropy(output, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.6f} scale {scaler.get_scale():g}")

print(f"final loss {loss.item():.9g}")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict()}, "model.pt")
