"""Character-level LSTM that carries its state from chunk to chunk (truncated backpropagation)."""
import torch
import torch.nn as nn

from by_hand import autocast, scaler

TEXT = "the quick brown fox jumps over the lazy dog and runs away from the slow grey cat. " * 12
chars = sorted(set(TEXT))
index = {c: i for i, c in enumerate(chars)}
corpus = torch.tensor([index[c] for c in TEXT])

SEQ, BATCH = 12, 4


class CharRNN(nn.Module):
    def __init__(self, vocab, hidden=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, 16)
        self.lstm = nn.LSTM(16, hidden, num_layers=1, batch_first=True)
        self.fc = nn.Linear(hidden, vocab)

    def forward(self, x, hidden=None):
        out, hidden = self.lstm(self.embed(x), hidden)
        return self.fc(out), hidden


torch.manual_seed(11)
streams = corpus[: len(corpus) // BATCH * BATCH].view(BATCH, -1)
model = CharRNN(len(chars))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
criterion = nn.CrossEntropyLoss(reduction="sum")

hidden = None
chunk = 0
for start in range(0, streams.size(1) - SEQ - 1, SEQ):
    x = streams[:, start:start + SEQ]
    y = streams[:, start + 1:start + SEQ + 1]
    if hidden is not None:
        hidden = tuple(h.detach() for h in hidden)
    with autocast():
        logits, hidden = model(x, hidden)
    logits, hidden = logits.float(), tuple(h.float() for h in hidden)
    loss = criterion(logits.reshape(-1, len(chars)), y.reshape(-1))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    if chunk % 5 == 0:
        print(f"chunk {chunk:2d} loss {loss.item() / SEQ / BATCH:.4f}")
    chunk += 1

print(chunk, "chunks")
print(f"final loss {loss.item():.9g}")
scaler.report()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")
