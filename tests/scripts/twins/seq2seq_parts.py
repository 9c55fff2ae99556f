"""Encoder and decoder called one by one, with teacher forcing; reverses short sequences."""

import torch
from torch import nn

from by_hand import attention, autocast, scaler

nn.functional.scaled_dot_product_attention = attention  # of nn.MultiheadAttention

config = dict(vocab=12, dim=24, length=6, batch=8, steps=25, lr=2e-3, seed=21)


class Encoder(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.mix = nn.Conv1d(dim, dim, 3, padding=1)

    def forward(self, tokens):
        return torch.tanh(self.mix(self.embedding(tokens).transpose(1, 2))).transpose(1, 2)


class Decoder(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.attend = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, memory, previous):
        found, _ = self.attend(self.embedding(previous), memory, memory, need_weights=False)
        return self.out(found)


class Seq2Seq(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.encoder = Encoder(vocab, dim)
        self.decoder = Decoder(vocab, dim)


def run(cfg):
    torch.manual_seed(cfg["seed"])
    model = Seq2Seq(cfg["vocab"], cfg["dim"])
    optimizer = torch.optim.RMSprop(model.parameters(), lr=cfg["lr"])
    criterion = nn.CrossEntropyLoss(reduction="sum")
    for step in range(cfg["steps"]):
        source = torch.randint(1, cfg["vocab"], (cfg["batch"], cfg["length"]))
        target = source.flip(1)
        previous = torch.cat([torch.zeros(cfg["batch"], 1, dtype=torch.long), target[:, :-1]], 1)
        with autocast():
            memory = model.encoder(source)
        with autocast():
            logits = model.decoder(memory.float(), previous)
        logits = logits.float()
        loss = criterion(logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 8 == 0:
            print("step", step, "loss", loss.item())
    with torch.no_grad():
        with autocast():
            z = model.encoder(source)
        with autocast():
            best = model.decoder(z.float(), previous).argmax(-1)
        print("right:", (best == target).float().mean().item())
    print(f"final loss {loss.item():.9g}")
    scaler.report()
    torch.save([model.state_dict(), optimizer.state_dict()], "model.pt")


run(config)
