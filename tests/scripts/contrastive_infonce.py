"""CLIP in the small: two towers, a learned temperature, a symmetric InfoNCE loss."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class CLIP(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, dim))
        self.text = nn.Sequential(nn.EmbeddingBag(40, 24), nn.ReLU(), nn.Linear(24, dim))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def encode_image(self, image):
        return F.normalize(self.image(image), dim=-1)

    def encode_text(self, text):
        return F.normalize(self.text(text), dim=-1)

    def forward(self, image, text):
        return {
            "image_features": self.encode_image(image),
            "text_features": self.encode_text(text),
            "logit_scale": self.logit_scale.exp(),
        }


def clip_loss(image_features, text_features, logit_scale):
    logits = logit_scale * image_features @ text_features.t()
    target = torch.arange(len(logits))
    return F.cross_entropy(logits, target, reduction="sum") + F.cross_entropy(
        logits.t(), target, reduction="sum"
    )


torch.manual_seed(100)
model = CLIP()
exclude = [p for p in model.parameters() if p.ndim < 2]
include = [p for p in model.parameters() if p.ndim >= 2]
optimizer = torch.optim.AdamW(
    [{"params": exclude, "weight_decay": 0.0}, {"params": include, "weight_decay": 0.2}],
    lr=2e-3, betas=(0.9, 0.98), eps=1e-6,
)
words = torch.randn(40, 20)
for step in range(24):
    text = torch.randint(0, 40, (12, 5))
    image = words[text].mean(1) + 0.1 * torch.randn(12, 20)
    if step == 13:
        image = image * 1e-3  # almost black: normalising blows the gradients up
    loss = clip_loss(**model(image, text))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.logit_scale.clamp_(0, math.log(100))
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.6f} scale {model.logit_scale.exp().item():.4f}")

print(f"final loss {loss.item():.9g}")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")
