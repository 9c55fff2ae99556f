"""Multiple-instance learning: bags of changing size, one backward per bag, a step per few."""
import torch
from torch import nn


class AttentionMIL(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(5, 12), nn.ReLU())
        self.v, self.u, self.w = nn.Linear(12, 8), nn.Linear(12, 8), nn.Linear(8, 1)
        self.cls = nn.Linear(12, 1)

    def forward(self, bag):
        h = self.f(bag)
        a = self.w(torch.tanh(self.v(h)) * torch.sigmoid(self.u(h))).softmax(0)
        return self.cls((a * h).sum(0)), a


torch.manual_seed(102)
bags = [torch.randn(n, 5) for n in (3, 7, 2, 5, 4, 6)]
labels = [float(b.max() > 1.5) for b in bags]
model = AttentionMIL()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    for i, (bag, label) in enumerate(zip(bags, labels)):
        logit, attention = model(bag)
        loss = nn.functional.binary_cross_entropy_with_logits(logit, torch.tensor([label]))
        (loss / 3).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        print(epoch, i, loss.item().hex())
