"""Stochastic weight averaging: AveragedModel, then batch-norm statistics again."""
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

torch.manual_seed(22)
model = nn.Sequential(nn.Linear(5, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 2))
averaged = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
batches = [(torch.randn(10, 5), torch.randint(2, (10,))) for _ in range(3)]
for epoch in range(4):
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    if epoch >= 1:
        averaged.update_parameters(model)
        scheduler.step()
    print(epoch, loss.item().hex())
update_bn((x for x, _ in batches), averaged)
averaged.eval()
with torch.no_grad():
    print(sum(nn.functional.cross_entropy(averaged(x), y) for x, y in batches).item().hex())
