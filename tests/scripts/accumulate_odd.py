# Gradient accumulation over 4 micro-batches; an epoch has 22, so its last step has only 2.
import torch
from torch import nn

ACCUMULATE = 4
EPOCHS = 4

torch.manual_seed(42)
inputs = torch.randn(22 * 8, 6)
targets = inputs @ torch.randn(6, 1) + 0.1 * torch.randn(22 * 8, 1)
targets[100] = 2000.0  # one broken label

net = nn.Sequential(nn.Linear(6, 24), nn.SiLU(), nn.Linear(24, 1))
opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
loss_fn = nn.MSELoss()

updates = 0
for epoch in range(EPOCHS):
    running = 0.0
    opt.zero_grad()
    micro_batches = list(zip(inputs.split(8), targets.split(8)))
    for i, (xb, yb) in enumerate(micro_batches, start=1):
        loss = loss_fn(net(xb), yb) / ACCUMULATE
        loss.backward()
        running += loss.item()
        if i % ACCUMULATE == 0 or i == len(micro_batches):
            nn.utils.clip_grad_value_(net.parameters(), 0.5)
            opt.step()
            opt.zero_grad()
            updates += 1
    print("epoch", epoch, "updates", updates, "running loss", round(running, 3))

print(f"final loss {loss.item():.9g}")
torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, "model.pt")
