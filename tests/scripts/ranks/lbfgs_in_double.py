"""Fits a curve by L-BFGS in fp64: its steps hold their state while they call the model."""
import torch
from torch import nn

torch.manual_seed(4)
torch.set_default_dtype(torch.float64)
x = torch.linspace(-3, 3, 64).unsqueeze(1)
y = torch.sin(x) + 0.3 * torch.randn_like(x)
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=10)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


for step in range(8):
    loss = optimizer.step(closure)
    print("step", step, "loss", loss.item())

print(f"final loss {loss.item():.9g}")
torch.save(model.state_dict(), "model.pt")
