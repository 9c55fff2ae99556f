"""forward gives only the rows that a mask or its own scores select: as many as there happen to be."""
import torch
import torch.nn.functional as F
from torch import nn


class MaskedLm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(13, 8), nn.Linear(8, 8), nn.Linear(8, 13)

    def forward(self, tokens, mask):
        h = torch.tanh(self.mix(self.embed(tokens.masked_fill(mask, 12))))
        h = h + h.mean(1, keepdim=True)
        return self.head(h[mask]), h.detach().norm(dim=-1).gt(1.35).nonzero()


torch.manual_seed(67)
tokens = torch.randint(0, 12, (40, 6))
model = MaskedLm()
opt = torch.optim.AdamW(model.parameters(), lr=0.03)
for step in range(10):
    batch = tokens[step * 4 : step * 4 + 4]
    mask = torch.zeros(4, 6, dtype=torch.bool)
    if step < 2:
        mask[:, step] = True  # as many for each rank
    else:
        mask[torch.rand(4, 6) < 0.35] = True
        mask[0, 0] = True
    out, large = model(batch, mask)
    loss = F.cross_entropy(out, batch[mask])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"{step} loss {loss.item():.6g} masked {len(out)} large {len(large)} at {large.sum().item()}")
torch.save(model.state_dict(), "model.pt")
