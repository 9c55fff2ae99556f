"""A transformer, sequence first, with causal and padding masks; as many steps as sequences."""
import torch
import torch.nn.functional as F
from torch import nn


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(12, 8), nn.Parameter(torch.randn(9, 1, 8) * 0.1)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 12)

    def forward(self, x, mask, padding):
        h = self.embed(x) + self.position[: len(x)]
        return self.head(self.layers(h, mask=mask, src_key_padding_mask=padding))


torch.manual_seed(163)
model = Decoder()
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(8):
    T, B = (6, 6) if step < 4 else (7 - step % 2, 6)
    x = torch.randint(1, 12, (T + 1, B))
    lengths = torch.randint(2, T + 1, (B,))
    padding = torch.arange(T)[None] >= lengths[:, None]
    mask = torch.full((T, T), float("-inf")).triu(1).masked_fill(torch.eye(T).bool(), 0.0)
    out = model(x[:-1], mask, padding.float().masked_fill(padding, -1e9))
    y = x[1:].masked_fill(padding.T, -100)
    loss = F.cross_entropy(out.flatten(0, 1), y.flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    right = (out.argmax(-1) == y).sum().item()
    print(f"T {T} loss {loss.item():.6g} right {right} of {(~padding).sum()} g {model.position.grad.norm():.6g}")
torch.save(model.state_dict(), "model.pt")
