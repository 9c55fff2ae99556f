"""Packed sequences come back padded to the longest of the batch, which need not be the rank's own."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(9, 5), nn.LSTM(5, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        out, (h, _) = self.rnn(packed)
        out, _ = pad_packed_sequence(out, batch_first=True)
        return self.head(out), h[-1]


torch.manual_seed(83)
model = Tagger()
opt = torch.optim.Adam(model.parameters(), lr=0.02)
for step in range(9):
    if step in (0, 1, 3):
        lengths = torch.tensor([5, 3, 2, 5, 1, 4])  # both halves are as long
    else:
        lengths = torch.randint(1, 6, (6,))
        lengths[step % 6] = 5
    texts = [torch.randint(0, 9, (int(n),)) for n in lengths]
    x = pad_sequence(texts, batch_first=True)
    y = pad_sequence([t.cumsum(0) % 3 for t in texts], batch_first=True, padding_value=-1)
    out, last = model(x, lengths)
    loss = F.cross_entropy(out.transpose(1, 2), y, ignore_index=-1) + 0.01 * last.norm()
    opt.zero_grad()
    loss.backward()
    opt.step()
    right = ((out.argmax(-1) == y) & (y >= 0)).sum().item()
    print(f"{step} loss {loss.item():.6g} right {right} of {int(lengths.sum())} shape {tuple(out.shape)}")
torch.save(model.state_dict(), "model.pt")
