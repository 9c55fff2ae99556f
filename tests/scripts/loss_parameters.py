"""Losses with parameters of their own, trained by the model's optimizer: centers and weights."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class CenterLoss(nn.Module):
    def __init__(self, num_classes, feat_dim):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(num_classes, feat_dim))

    def forward(self, features, labels):
        return (features - self.centers[labels]).pow(2).sum(1).mean()


class UncertaintyWeights(nn.Module):
    """Kendall et al.: each loss weighted by a learned variance."""

    def __init__(self, n):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(n))

    def forward(self, *losses):
        total = 0
        for loss, s in zip(losses, self.log_vars):
            total = total + torch.exp(-s) * loss + s
        return total


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(8, 32), nn.PReLU(), nn.Linear(32, 6))
        self.classifier = nn.Linear(6, 4)

    def forward(self, x):
        f = self.features(x)
        return f, self.classifier(f)


torch.manual_seed(77)
net, center_loss, weighting = Net(), CenterLoss(4, 6), UncertaintyWeights(2)
optimizer = torch.optim.Adam(
    [
        {"params": net.parameters(), "lr": 5e-3},
        {"params": center_loss.parameters(), "lr": 5e-2},
        {"params": weighting.parameters(), "weight_decay": 0.0},
    ],
    lr=1e-3, weight_decay=1e-4,
)
means = torch.randn(4, 8) * 2
for step in range(26):
    labels = torch.randint(0, 4, (24,))
    x = means[labels] + torch.randn(24, 8)
    if step == 8:
        x[0] = 5000.0
    features, logits = net(x)
    loss = weighting(F.cross_entropy(logits, labels), center_loss(features, labels))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"{step:02d} loss={loss.item():.5f} vars={weighting.log_vars.exp().tolist()}")

print(f"final loss {loss.item():.9g}")
torch.save(
    {
        "net": net.state_dict(), "center_loss": center_loss.state_dict(),
        "weighting": weighting.state_dict(), "optimizer": optimizer.state_dict(),
    },
    "model.pt",
)
