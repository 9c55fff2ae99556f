"""Grad-CAM and feature matching: gradients of one output with respect to another output."""
import torch
import torch.nn.functional as F
from torch import nn


class Cam(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv1d(2, 5, 3), nn.Linear(5, 3)

    def forward(self, x):
        maps = torch.relu(self.conv(x))
        return maps, self.head(maps.mean(-1))


torch.manual_seed(4)
x, y = torch.randn(20, 2, 9), torch.randint(0, 3, (20,))
model = Cam()
opt = torch.optim.Adam(model.parameters(), lr=0.02)
for step in range(7):
    rows = torch.randperm(20)[: 6 + step % 3]
    maps, logits = model(x[rows])
    score = logits.gather(1, y[rows, None]).sum()
    (g,) = torch.autograd.grad(score, maps, create_graph=True)
    cam = torch.relu((g.mean(-1, keepdim=True) * maps).sum(1))
    loss = F.cross_entropy(logits, y[rows]) + 0.1 * cam.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"loss {loss.item():.6g} cam {cam.max().item():.6g} at {int(cam[0].argmax())} g {g.norm():.6g}")
torch.save(model.state_dict(), "model.pt")
