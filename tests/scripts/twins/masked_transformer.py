"""Sequences of changing length through nn.TransformerEncoder with a padding mask."""
import torch
from torch import nn

from by_hand import attention, autocast, scaler

nn.functional.scaled_dot_product_attention = attention  # of nn.TransformerEncoderLayer

PAD = 0


def cycle(loader):
    while True:
        yield from loader


def make_batches(count, g):
    result = []
    for _ in range(count):
        longest = int(torch.randint(5, 10, (1,), generator=g))
        tokens = torch.randint(1, 20, (8, longest), generator=g)
        lengths = torch.randint(2, longest + 1, (8,), generator=g)
        tokens[torch.arange(longest) >= lengths.unsqueeze(1)] = PAD
        result.append((tokens, tokens.bitwise_and(1).sum(1, keepdim=True).float()))
    return result


class Counter(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embed = nn.Embedding(20, dim, padding_idx=PAD)
        layer = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(dim, 1)

    def forward(self, tokens):
        mask = tokens.eq(PAD)
        h = self.encoder(self.embed(tokens), src_key_padding_mask=mask)
        return self.head(h.masked_fill(mask.unsqueeze(-1), 0).sum(1))


torch.manual_seed(23)
model = Counter()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
stream = cycle(make_batches(6, torch.Generator().manual_seed(23)))
for step in range(24):
    tokens, counts = next(stream)
    with autocast():
        found = model(tokens)
    loss = nn.functional.mse_loss(found.float(), counts, reduction="sum")
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 6 == 5:
        print(f"after {step + 1} steps, length {tokens.size(1)}: loss {loss.item():.6f}")

print(f"final loss {loss.item():.9g}")
scaler.report()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")
