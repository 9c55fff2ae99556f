"""A recursive network: its forward follows nested tuples."""
import torch
from torch import nn


class TreeLSTM(nn.Module):
    def __init__(self, vocab=6, d=8):
        super().__init__()
        self.leaf = nn.Embedding(vocab, d)
        self.gates = nn.Linear(2 * d, 5 * d)
        self.out = nn.Linear(d, 2)

    def encode(self, tree):
        if isinstance(tree, int):
            h = self.leaf(torch.tensor(tree))
            return h, torch.zeros_like(h)
        (hl, cl), (hr, cr) = map(self.encode, tree)
        i, fl, fr, o, g = self.gates(torch.cat([hl, hr])).chunk(5)
        c = i.sigmoid() * g.tanh() + fl.sigmoid() * cl + fr.sigmoid() * cr
        return o.sigmoid() * c.tanh(), c

    def forward(self, trees):
        return self.out(torch.stack([self.encode(t)[0] for t in trees]))


TREES = [((0, 1), 2), (3, (4, (5, 0))), (1, 1), ((2, 3), (4, 5))]
torch.manual_seed(101)
model = TreeLSTM()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
y = torch.tensor([0, 1, 0, 1])
for epoch in range(4):
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(TREES), y)
    loss.backward()
    optimizer.step()
    print(epoch, loss.item().hex())
