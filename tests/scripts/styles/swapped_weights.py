"""Parameters are replaced by new objects during training, and the optimizer is pointed at them."""
import torch
from torch import nn

torch.manual_seed(107)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x, y = torch.randn(12, 4), torch.randint(2, (12,))


def widen(extra):
    a, b = model[0], model[2]
    a.weight = nn.Parameter(torch.cat([a.weight.data, 0.1 * torch.randn(extra, 4)]))
    a.bias = nn.Parameter(torch.cat([a.bias.data, torch.zeros(extra)]))
    b.weight = nn.Parameter(torch.cat([b.weight.data, torch.zeros(2, extra)], 1))
    optimizer.param_groups[0]["params"] = list(model.parameters())
    optimizer.state.clear()


for step in range(7):
    if step in (2, 5):
        widen(2)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), model[0].weight.shape[0])
