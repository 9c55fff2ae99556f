"""The head trains alone at first; the backbone joins by add_param_group, then is frozen again."""
import torch
from torch import nn

torch.manual_seed(70)
backbone = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU())
head = nn.Linear(16, 2)
for p in backbone.parameters():
    p.requires_grad = False
optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
x, y = torch.randn(20, 6), torch.randint(2, (20,))
for step in range(9):
    if step == 3:
        backbone.requires_grad_(True)
        optimizer.add_param_group({"params": backbone.parameters(), "lr": 0.01})
    if step == 6:
        backbone.requires_grad_(False).eval()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(head(backbone(x)), y)
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), sum(p.grad is not None for p in backbone.parameters()))
