"""Detection: lists of images and of dicts go in; a dict of losses, or a list of dicts, comes out."""
import torch
import torch.nn.functional as F
from torch import nn


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.box, self.score = nn.Conv2d(1, 4, 3), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, images, targets=None):
        h = torch.stack([self.body(i[None]).relu().mean((2, 3))[0] for i in images])
        boxes, scores = self.box(h), self.score(h)[:, 0]
        if targets is None:
            return [{"box": b, "score": s.sigmoid(), "keep": bool(s > 0)} for b, s in zip(boxes, scores)]
        have = torch.tensor([len(t["boxes"]) > 0 for t in targets])
        wanted = [t["boxes"].mean(0) for t in targets if len(t["boxes"])]
        reg = F.l1_loss(boxes[have], torch.stack(wanted)) if wanted else boxes.sum() * 0
        return {"box": reg, "score": F.binary_cross_entropy_with_logits(scores, have.float())}


torch.manual_seed(41)
images = [torch.randn(1, 5 + i % 3, 6) for i in range(18)]
targets = [{"boxes": torch.rand(i % 4, 4), "id": i} for i in range(18)]
model = Detector()
opt = torch.optim.Adam(model.parameters(), lr=0.02)
for step in range(8):
    at = [(step * 5 + j) % 18 for j in range(4 + step % 3)]
    losses = model([images[i] for i in at], [targets[i] for i in at])
    loss = sum(losses.values())
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(", ".join(f"{k} {v.item():.6g}" for k, v in losses.items()), f"g {model.body.weight.grad.norm():.6g}")
model.eval()
with torch.no_grad():
    found = model(images)
print("kept", sum(f["keep"] for f in found), f"{sum(f['box'].sum() for f in found):.6g}", found[3]["score"].shape)
torch.save(model.state_dict(), "model.pt")
