"""EmbeddingBag: flat indices and offsets, sparse gradients, per-sample weights, SparseAdam."""
import torch
import torch.nn.functional as F
from torch import nn


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 6, mode="sum", sparse=True)
        self.head = nn.Linear(6, 2)

    def forward(self, flat, offsets, weights):
        return self.head(self.bag(flat, offsets, per_sample_weights=weights))


torch.manual_seed(1)
model = Bags()
sparse, dense = torch.optim.SparseAdam([model.bag.weight], lr=0.05), torch.optim.Adam(model.head.parameters(), lr=0.02)
for step in range(8):
    # In some steps there are as many words as texts.
    lengths = torch.ones(6, dtype=torch.long) if step % 3 == 0 else torch.randint(1, 5, (6,))
    flat = torch.randint(0, 20, (int(lengths.sum()),))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
    y = torch.zeros(6, dtype=torch.long)
    y[flat[offsets] > 9] = 1
    loss = F.cross_entropy(model(flat, offsets, torch.rand(len(flat))), y)
    sparse.zero_grad()
    dense.zero_grad()
    loss.backward()
    rows = model.bag.weight.grad.coalesce().indices().unique().numel()
    print(f"loss {loss.item():.6g} words {len(flat)} rows {rows} {model.bag.weight.grad.is_sparse}")
    sparse.step()
    dense.step()
torch.save(model.state_dict(), "model.pt")
