"""Magnitude pruning: masks by nn.utils.prune, then fine-tuning, then made permanent."""
import torch
from torch import nn
from torch.nn.utils import prune

torch.manual_seed(36)
model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 2))
x, y = torch.randn(30, 8), torch.randint(2, (30,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(n):
    for _ in range(n):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(loss.item().hex())


train(2)
for amount in (0.3, 0.3):
    prune.l1_unstructured(model[0], "weight", amount=amount)
    prune.ln_structured(model[2], "weight", amount=0.1, n=2, dim=1)
    train(2)
for layer in (model[0], model[2]):
    prune.remove(layer, "weight")
print("zeros", int((model[0].weight == 0).sum()), int((model[2].weight == 0).sum()))
