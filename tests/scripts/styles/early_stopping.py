"""Early stopping with patience; the best weights are restored from memory."""
import torch
from torch import nn


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.bad, self.best, self.state = patience, 0, float("inf"), None

    def __call__(self, value, model):
        if value < self.best:
            self.best, self.bad = value, 0
            self.state = {k: v.clone() for k, v in model.state_dict().items()}
        else:
            self.bad += 1
        return self.bad > self.patience


torch.manual_seed(64)
model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
x, y = torch.randn(10, 4), torch.randn(10, 1)
vx, vy = torch.randn(10, 4), torch.randn(10, 1)
stopper = EarlyStopping(patience=1)
for epoch in range(12):
    model.train()
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.inference_mode():
        val = nn.functional.mse_loss(model(vx), vy).item()
    print(epoch, loss.item().hex(), val.hex())
    if stopper(val, model):
        break
model.load_state_dict(stopper.state)
print(sum(v.double().sum().item() for v in model.state_dict().values()).hex())
