"""CutMix and mixup by NumPy's random numbers, labels mixed by what was really cut."""
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

np.random.seed(0)
torch.manual_seed(0)
images, labels = torch.randn(30, 1, 8, 8), torch.randint(0, 3, (30,))
net = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
opt = torch.optim.Adagrad(net.parameters(), lr=0.05)
for step in range(8):
    rows = np.random.choice(30, 9, replace=False)
    x, y = images[rows].clone(), labels[rows]
    perm = torch.from_numpy(np.random.permutation(9))
    lam = np.random.beta(1.0, 1.0)
    if np.random.rand() < 0.5:
        h, w = int(8 * np.sqrt(1 - lam)), np.random.randint(1, 8)
        x[:, :, :h, :w] = x[perm][:, :, :h, :w]
        lam = 1 - h * w / 64
    else:
        x = lam * x + (1 - lam) * x[perm]
    out = net(x.float())
    loss = lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[perm])
    opt.zero_grad()
    loss.backward()
    opt.step()
    hits = lam * (out.argmax(1) == y).sum().item() + (1 - lam) * (out.argmax(1) == y[perm]).sum().item()
    print(f"lam {lam:.6g} loss {loss.item():.6g} hits {hits:.6g}")
torch.save(net.state_dict(), "model.pt")
