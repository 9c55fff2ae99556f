"""Few shots: support and query of the same size go into one call, prototypes are made in it."""
import torch
import torch.nn.functional as F
from torch import nn


class Proto(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 5, bias=False))

    def forward(self, support, labels, query):
        s, q = self.net(support), self.net(query)
        prototypes = torch.stack([s[labels == c].mean(0) for c in labels.unique()])
        return -torch.cdist(q, prototypes).pow(2), prototypes


torch.manual_seed(109)
centres = torch.randn(6, 4) * 2
model = Proto()
opt = torch.optim.Adam(model.parameters(), lr=0.02)
for episode in range(8):
    classes = torch.randperm(6)[:3]
    labels = torch.arange(3).repeat(4)  # 12 support and, mostly, 12 query samples
    wanted = torch.randint(0, 3, (12 if episode != 5 else 9,))
    support = centres[classes[labels]] + torch.randn(12, 4)
    query = centres[classes[wanted]] + torch.randn(len(wanted), 4)
    scores, prototypes = model(support, labels, query)
    loss = F.cross_entropy(scores, wanted)
    opt.zero_grad()
    loss.backward()
    opt.step()
    hits = (scores.argmax(1) == wanted).sum().item()
    print(f"loss {loss.item():.6g} hits {hits} of {len(wanted)} spread {torch.pdist(prototypes).min().item():.6g}")
torch.save(model.state_dict(), "model.pt")
