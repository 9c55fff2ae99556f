"""The model grows: a wider layer with copied weights, another block, then a head around all."""
import torch
from torch import nn

torch.manual_seed(31)
x = torch.randn(32, 4)
t = x.pow(2).sum(1, keepdim=True)


def train(model, steps):
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        rows = torch.arange(step, 32, 3)
        loss = (model(x[rows]) - t[rows]).abs().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"{sum(p.numel() for p in model.parameters())} loss {loss.item():.6g}")


model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
train(model, 3)
wide_in, wide_out = nn.Linear(4, 8), nn.Linear(8, 1)
with torch.no_grad():
    wide_in.weight[:5], wide_in.bias[:5] = model[0].weight, model[0].bias
    wide_out.weight[:, :5] = model[2].weight
    wide_out.weight[:, 5:] = 0
model[0], model[2] = wide_in, wide_out
train(model, 4)
model.insert(2, nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
train(model, 3)
model = nn.Sequential(model, nn.Unflatten(1, (1, 1)), nn.Flatten(), nn.Linear(1, 1))
train(model, 5)
torch.save(model.state_dict(), "model.pt")
