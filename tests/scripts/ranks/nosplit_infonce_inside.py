"""InfoNCE is computed in forward: the other rows of the batch are the negatives."""
import torch
import torch.nn.functional as F
from torch import nn


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, text):
        a, b = F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)
        logits = self.scale.exp() * a @ b.T
        labels = torch.arange(len(a))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2, logits.detach()


torch.manual_seed(0)
x = torch.randn(40, 6)
t = torch.cat([x[:, :4] + 0.3 * torch.randn(40, 4), torch.randn(40, 1)], 1)
model = Clip()
opt = torch.optim.Adam(model.parameters(), lr=0.02)
for step in range(9):
    rows = torch.randperm(40)[: 8 - step % 3]
    loss, logits = model(x[rows], t[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    right = (logits.argmax(1) == torch.arange(len(rows))).sum().item()
    print(f"loss {loss.item():.6g} right {right} shape {tuple(logits.shape)} scale {model.scale.item():.6g}")
torch.save(model.state_dict(), "model.pt")
