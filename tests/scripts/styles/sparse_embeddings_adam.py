"""Sparse gradients: SparseAdam for the embeddings, Adam for the rest."""
import torch
from torch import nn


class SkipGram(nn.Module):
    def __init__(self, vocab=30, dim=8):
        super().__init__()
        self.center = nn.Embedding(vocab, dim, sparse=True)
        self.context = nn.EmbeddingBag(vocab, dim, mode="mean", sparse=True)
        self.mix = nn.Bilinear(dim, dim, 1)

    def forward(self, word, bag):
        return self.mix(self.center(word), self.context(bag)).squeeze(1)


torch.manual_seed(59)
model = SkipGram()
sparse = torch.optim.SparseAdam([model.center.weight, model.context.weight], lr=1e-2)
dense = torch.optim.Adam(model.mix.parameters(), lr=1e-2)
for step in range(6):
    word, bag = torch.randint(30, (16,)), torch.randint(30, (16, 4))
    label = ((word[:, None] - bag).abs().min(1).values < 3).float()
    loss = nn.functional.binary_cross_entropy_with_logits(model(word, bag), label)
    sparse.zero_grad()
    dense.zero_grad()
    loss.backward()
    sparse.step()
    dense.step()
    print(step, loss.item().hex())
