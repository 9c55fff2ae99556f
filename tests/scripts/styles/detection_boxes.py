"""A one-stage detector: anchors, IoU matching, GIoU loss, and NMS by hand."""
import torch
from torch import nn
import torch.nn.functional as F


def iou(a, b):
    tl = torch.max(a[:, None, :2], b[None, :, :2])
    br = torch.min(a[:, None, 2:], b[None, :, 2:])
    inter = (br - tl).clamp(min=0).prod(2)
    area = lambda z: (z[:, 2:] - z[:, :2]).prod(1)
    return inter / (area(a)[:, None] + area(b)[None] - inter + 1e-6)


def nms(boxes, scores, limit=0.5):
    keep, order = [], scores.argsort(descending=True)
    while order.numel():
        keep.append(order[0].item())
        order = order[1:][iou(boxes[order[:1]], boxes[order[1:]])[0] <= limit]
    return keep


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
        self.cls, self.reg = nn.Conv2d(8, 1, 1), nn.Conv2d(8, 4, 1)

    def forward(self, img):
        h = self.body(img)
        return self.cls(h).flatten(1), self.reg(h).flatten(2).transpose(1, 2)


torch.manual_seed(41)
grid = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="xy"), -1).view(-1, 2) * 4 + 2
anchors = torch.cat([grid - 3, grid + 3], 1)
truth = torch.tensor([[1.0, 1.0, 7.0, 8.0], [8.0, 8.0, 15.0, 14.0]])
image = torch.zeros(1, 1, 16, 16)
for x0, y0, x1, y1 in truth.long().tolist():
    image[..., y0:y1, x0:x1] = 1
model = Detector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for step in range(6):
    logits, deltas = model(image)
    best, match = iou(anchors, truth).max(1)
    positive = best > 0.3
    boxes = anchors + deltas[0]
    cls = F.binary_cross_entropy_with_logits(logits[0], positive.float())
    pairs = iou(boxes[positive], truth).gather(1, match[positive, None])
    loss = cls + (1 - pairs).mean() + 0.05 * F.l1_loss(boxes[positive], truth[match[positive]])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), cls.item().hex())
with torch.no_grad():
    logits, deltas = model(image)
    print("kept", len(nms(anchors + deltas[0], logits[0])) > 0)
