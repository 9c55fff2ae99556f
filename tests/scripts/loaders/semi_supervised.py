"""A few labels and many samples without: classify the ones, reconstruct the others."""
from itertools import chain

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_data():
    g = torch.Generator().manual_seed(31)
    centers = 1.5 * torch.randn(4, 12, generator=g)
    labels = torch.randint(0, 4, (400,), generator=g)
    samples = centers[labels] + torch.randn(400, 12, generator=g)
    labelled = TensorDataset(samples[:69], labels[:69])
    unlabelled = TensorDataset(samples[69:320])
    test = TensorDataset(samples[320:], labels[320:])
    return labelled, unlabelled, test


def to(device, *tensors):
    return [t.to(device) for t in tensors]


class Parts(nn.Module):
    """Holds the networks together; they are called one by one."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 24), nn.SiLU(), nn.Linear(24, 6))
        self.decoder = nn.Sequential(nn.Linear(6, 24), nn.SiLU(), nn.Linear(24, 12))
        self.classifier = nn.Linear(6, 4)


torch.manual_seed(31)
device = "cuda" if torch.cuda.is_available() else "cpu"
labelled, unlabelled, test = make_data()
labelled_loader = DataLoader(labelled, batch_size=10, shuffle=True)
unlabelled_loader = DataLoader(unlabelled, batch_size=24, shuffle=True)
test_loader = DataLoader(test, batch_size=40)

parts = Parts().to(device)
optimizer = torch.optim.RMSprop(
    chain(parts.encoder.parameters(), parts.decoder.parameters(), parts.classifier.parameters()),
    lr=2e-3, momentum=0.5, eps=1e-3,
)

step = 0
for epoch in range(4):
    parts.train()
    # there are fewer labelled batches: the rest of the others waits for its turn
    for (u,), (x, y) in zip(unlabelled_loader, labelled_loader):
        u, x, y = to(device, u, x, y)
        supervised = F.cross_entropy(parts.classifier(parts.encoder(x)), y)
        reconstruction = F.mse_loss(parts.decoder(parts.encoder(u)), u)
        loss = supervised + 0.5 * reconstruction
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {float(loss.detach()):.9g}")
        step += 1
    print(f"epoch {epoch} of which supervised {supervised.item():.6f} "
          f"reconstruction {reconstruction.item():.6f}")

    parts.eval()
    right, squares = 0, 0.0
    with torch.no_grad():
        for x, y in test_loader:
            x, y = to(device, x, y)
            code = parts.encoder(x)
            right += (parts.classifier(code).argmax(-1) == y).sum().item()
            squares += (parts.decoder(code) - x).pow(2).mean(1).sum().item()
    print(f"epoch {epoch} accuracy {right / len(test):.4f} mse {squares / len(test):.6f}")

print(f"final loss {float(loss.detach()):.9g}")
torch.save({"parts": parts.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")
