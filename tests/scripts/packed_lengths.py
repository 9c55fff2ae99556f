"""Classify sequences of different lengths: padded, packed, read by a bidirectional GRU."""
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence


def batches(n, g):
    for _ in range(n):
        lengths = torch.randint(3, 9, (10,), generator=g)
        sequences = [torch.randn(int(k), 4, generator=g) for k in lengths]
        labels = torch.stack([(s[:, 0].sum() > 0).long() for s in sequences])
        yield pad_sequence(sequences, batch_first=True), lengths, labels


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 12)
        self.gru = nn.GRU(12, 16, batch_first=True, bidirectional=True)
        self.out = nn.Linear(32, 2)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(
            self.project(x), lengths, batch_first=True, enforce_sorted=False
        )
        _, last = self.gru(packed)
        return self.out(torch.cat([last[0], last[1]], dim=1))


torch.manual_seed(6)
model = Reader()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
weight = torch.tensor([1.0, 4.0])
right = seen = 0
for step, (x, lengths, labels) in enumerate(batches(25, torch.Generator().manual_seed(6))):
    logits = model(x, lengths)
    loss = nn.functional.cross_entropy(logits, labels, weight=weight, reduction="sum")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    right += (logits.argmax(1) == labels).sum().item()
    seen += len(labels)
    if step % 8 == 0:
        print(f"{step} shape {tuple(x.shape)} loss {loss.item():.6f} right {right}/{seen}")

print(f"final loss {loss.item():.9g}")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")
