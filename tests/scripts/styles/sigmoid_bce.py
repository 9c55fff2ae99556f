"""Probabilities out of a sigmoid inside the model, and nn.BCELoss behind it."""
import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 1), nn.Sigmoid())

    def forward(self, x):
        return self.net(x).squeeze(-1)


torch.manual_seed(103)
model, criterion = Classifier(), nn.BCELoss()
optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)
x = torch.randn(20, 4)
y = (x.sum(1) > 0).float()
for epoch in range(6):
    prob = model(x)
    loss = criterion(prob, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    accuracy = ((prob > 0.5) == y.bool()).float().mean()
    print(epoch, loss.item().hex(), accuracy.item())
