# Which of four quadrants (turned a little) does a point lie in?
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

points = torch.randn(240, 2)
turned = points @ torch.tensor([[0.9, -0.4], [0.4, 0.9]]) + 0.2 * torch.randn(240, 2)
labels = 2 * (turned[:, 0] > 0).long() + (turned[:, 1] > 0).long()

train_loader = DataLoader(TensorDataset(points[:160], labels[:160]), batch_size=16, shuffle=True)
test_loader = DataLoader(TensorDataset(points[160:], labels[160:]), batch_size=16)

model = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4))
model.to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

step = 0
for epoch in range(3):
    model.train()
    for x, y in train_loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        step += 1
        print(f"step {step} loss {loss.item():.9g}")

    model.eval()
    correct, total = 0, 0
    with torch.no_grad():
        for x, y in test_loader:
            x, y = x.to(device), y.to(device)
            correct += (model(x).argmax(dim=1) == y).sum().item()
            total += y.size(0)
    print(f"epoch {epoch} test accuracy {correct}/{total} = {correct / total:.4f}")

print(f"final loss {loss.item():.9g}")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")
