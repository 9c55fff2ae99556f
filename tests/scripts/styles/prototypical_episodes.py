"""Few-shot learning by prototypes, episode by episode."""
import torch
from torch import nn
import torch.nn.functional as F


def episode(means, n_way=3, shots=2, queries=4):
    classes = torch.randperm(len(means))[:n_way]
    draw = lambda n: means[classes].repeat_interleave(n, 0) + 0.4 * torch.randn(n_way * n, means.size(1))
    return draw(shots), draw(queries), torch.arange(n_way).repeat_interleave(queries)


torch.manual_seed(93)
means = torch.randn(8, 6)
encoder = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
optimizer = torch.optim.Adam(encoder.parameters(), lr=5e-3)
accuracy = []
for it in range(6):
    support, query, y = episode(means)
    prototypes = encoder(support).view(3, 2, -1).mean(1)
    logits = -torch.cdist(encoder(query), prototypes).pow(2)
    loss = F.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    accuracy.append((logits.argmax(1) == y).float().mean().item())
    print(it, loss.item().hex())
