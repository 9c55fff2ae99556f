"""Encoder and decoder in one model; teacher forcing by random.random() inside of forward."""
import random

import torch
import torch.nn.functional as F
from torch import nn


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 6)
        self.encoder, self.decoder, self.out = nn.GRU(6, 7), nn.GRUCell(6, 7), nn.Linear(7, 8)

    def forward(self, src, tgt, forcing=0.5):
        _, h = self.encoder(self.embed(src))
        h, token, outs = h[0], tgt[0], []
        for t in range(1, len(tgt)):
            h = self.decoder(self.embed(token), h)
            outs.append(self.out(h))
            token = tgt[t] if random.random() < forcing else outs[-1].argmax(1)
        return torch.stack(outs)


random.seed(5)
torch.manual_seed(131)
model = Seq2Seq()
opt = torch.optim.Adam(model.parameters(), lr=0.02)
for step in range(8):
    src = torch.randint(1, 8, (5, 5 + step % 3))  # as many words as texts at first
    tgt = torch.cat([torch.zeros(1, src.size(1), dtype=torch.long), src.flip(0)])
    out = model(src, tgt, forcing=1 - step / 8 if step % 4 else 1.0)
    loss = F.cross_entropy(out.flatten(0, 1), tgt[1:].flatten())
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    exact = (out.argmax(-1) == tgt[1:]).all(0).sum().item()
    print(f"loss {loss.item():.6g} exact {exact} next {random.random():.6g}")
with torch.no_grad():
    print("greedy", model(src[:, :1], tgt[:, :1], forcing=0.0).argmax(-1).flatten().tolist())
torch.save(model.state_dict(), "model.pt")
