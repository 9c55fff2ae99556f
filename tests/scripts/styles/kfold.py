"""Cross-validation: a new model and optimizer per fold, with a mean over the folds."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

torch.manual_seed(66)
x = torch.randn(24, 4)
data = TensorDataset(x, (x[:, 0] > x[:, 1]).long())
scores = []
for fold in range(3):
    held = set(range(fold, 24, 3))
    train = DataLoader(Subset(data, [i for i in range(24) if i not in held]), batch_size=8, shuffle=True)
    test = DataLoader(Subset(data, sorted(held)), batch_size=8)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for bx, by in train:
        loss = nn.functional.cross_entropy(model(bx), by)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        scores.append(sum(nn.functional.cross_entropy(model(bx), by).item() for bx, by in test))
    print(fold, loss.item().hex(), scores[-1].hex())
print("mean", (sum(scores) / len(scores)).hex())
