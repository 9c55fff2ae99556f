"""L-BFGS, which calls the model as often as it likes, and a loop without any optimizer."""

import torch
from torch import nn

call = globals().get("call", lambda module, *args: module(*args))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
x = torch.randn(16, 4)
target = x.square().sum(1, keepdim=True)


def closure():
    optimizer.zero_grad()
    loss = (call(model, x) - target).square().mean()
    loss.backward()
    return loss


losses = [optimizer.step(closure).item() for _ in range(3)]
for _ in range(17):
    model.zero_grad()
    loss = closure()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.001 * p.grad
    losses.append(loss.item())

result = model.state_dict()
