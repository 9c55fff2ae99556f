"""A mixture of experts whose balance loss (shares times mean gates) and capacity follow from the batch."""
import torch
import torch.nn.functional as F
from torch import nn


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.head = nn.Linear(5, 3), nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(5, 6) for _ in range(3))

    def forward(self, x):
        gates = self.gate(x).softmax(1)
        weight, chosen = gates.max(1)
        shares = F.one_hot(chosen, 3).float().mean(0)
        self.aux_loss = 3 * (shares * gates.mean(0)).sum()
        capacity = -(-len(x) // 2)
        out, dropped = torch.zeros(len(x), 6), 0
        for i, expert in enumerate(self.experts):
            mine = (chosen == i).nonzero()[:, 0]
            dropped += max(0, len(mine) - capacity)
            mine = mine[:capacity]  # first come, first served
            out = out.index_copy(0, mine, weight[mine, None] * expert(x[mine]).tanh())
        return self.head(out), dropped


torch.manual_seed(2)
x = torch.randn(44, 5)
y = (x[:, 0] > x[:, 1]).long()
moe = Moe()
opt = torch.optim.Adam(moe.parameters(), lr=0.03)
for step in range(10):
    rows = torch.arange(step * 4, step * 4 + 8) % 44
    out, dropped = moe(x[rows])
    loss = F.cross_entropy(out, y[rows]) + 0.1 * moe.aux_loss
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"loss {loss.item():.6g} aux {moe.aux_loss.item():.6g} dropped {dropped}")
torch.save(moe.state_dict(), "model.pt")
