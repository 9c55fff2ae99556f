"""GRU encoder and decoder with additive attention and teacher forcing by chance."""
import random

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.emb, self.gru = nn.Embedding(vocab, dim), nn.GRU(dim, dim, batch_first=True)

    def forward(self, src):
        return self.gru(self.emb(src))


class Decoder(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.emb, self.cell = nn.Embedding(vocab, dim), nn.GRUCell(2 * dim, dim)
        self.query, self.key, self.score = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, 1)
        self.out = nn.Linear(dim, vocab)

    def forward(self, token, h, memory):
        weights = self.score(torch.tanh(self.query(h)[:, None] + self.key(memory))).softmax(1)
        context = (weights * memory).sum(1)
        h = self.cell(torch.cat([self.emb(token), context], 1), h)
        return self.out(h), h


random.seed(42)
torch.manual_seed(42)
enc, dec = Encoder(9, 12), Decoder(9, 12)
opt_e, opt_d = (torch.optim.Adam(m.parameters(), 5e-3) for m in (enc, dec))
for step in range(5):
    src = torch.randint(1, 9, (6, 5))
    tgt = src.flip(1)
    memory, h = enc(src)
    h, token, loss = h[0], torch.zeros(6, dtype=torch.long), 0.0
    for t in range(5):
        logits, h = dec(token, h, memory)
        loss = loss + nn.functional.cross_entropy(logits, tgt[:, t])
        token = tgt[:, t] if random.random() < 0.5 else logits.argmax(1)
    opt_e.zero_grad(), opt_d.zero_grad()
    loss.backward()
    opt_e.step(), opt_d.step()
    print(step, loss.item().hex())
