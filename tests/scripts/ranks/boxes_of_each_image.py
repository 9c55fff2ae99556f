"""Boxes of each image, of which only one has as many as there are ranks: they are no batch.

In the first steps an L1 loss is linear in them, so that their parts have the sum of the whole.
"""
import torch
import torch.nn.functional as F
from torch import nn


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 4)

    def forward(self, images, targets):
        boxes = torch.stack([self.body(image).mean(0) for image in images])
        return F.l1_loss(boxes, torch.stack([t["boxes"].mean(0) for t in targets]))


torch.manual_seed(6)
images = [torch.randn(1, 6) for _ in range(3)]
model = Detector()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    targets = [{"boxes": torch.rand(count, 4) + 9} for count in (1, 4, 1)]
    if step in (2, 4, 5):
        targets[1]["boxes"][2:] = -9
    loss = model(images, targets)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"loss {loss.item():.6g}")
torch.save(model.state_dict(), "model.pt")
