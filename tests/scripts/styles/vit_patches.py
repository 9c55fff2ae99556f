"""A vision transformer of torch's own layers with a class token and random erasing."""
import torch
from torch import nn


class ViT(nn.Module):
    def __init__(self, d=16, n=9):
        super().__init__()
        self.patch = nn.Conv2d(1, d, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, d))
        self.pos = nn.Parameter(torch.randn(1, n + 1, d) * 0.02)
        layer = nn.TransformerEncoderLayer(d, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d, 3)

    def forward(self, img):
        h = self.patch(img).flatten(2).transpose(1, 2)
        h = torch.cat([self.cls.expand(len(h), -1, -1), h], 1) + self.pos
        return self.head(self.encoder(h)[:, 0])


torch.manual_seed(97)
model = ViT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
images, y = torch.randn(6, 1, 12, 12), torch.randint(3, (6,))
for step in range(4):
    x = images.clone()
    r, c = torch.randint(8, (2,)).tolist()
    x[..., r:r + 4, c:c + 4] = 0
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
model.eval()
with torch.no_grad():
    print(model(images).double().sum().item().hex())
