"""A residual net whose blocks the script itself loops over, outside of any forward."""
import torch
from torch import nn

torch.manual_seed(8)
stem = nn.Linear(6, 16)
blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(4))
head = nn.Linear(16, 3)
everything = nn.ModuleDict({"stem": stem, "blocks": blocks, "head": head})
optimizer = torch.optim.AdamW(everything.parameters(), lr=1e-2)
x, y = torch.randn(12, 6), torch.randint(3, (12,))
for step in range(6):
    h = stem(x)
    skips = []
    for i, block in enumerate(blocks):
        h = h + block(h)
        if i % 2:
            skips.append(h.mean())
    loss = nn.functional.cross_entropy(head(h), y) + 1e-3 * torch.stack(skips).sum()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(everything.parameters(), 1.0)
    optimizer.step()
    print(step, loss.item().hex())
