"""Hard routing to experts by the largest gate: some of them get nothing, and keep no gradient."""
import torch
import torch.nn.functional as F
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 5)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)) for _ in range(5))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return out, chosen


torch.manual_seed(181)
x, y = torch.randn(40, 4), torch.randint(0, 3, (40,))
model = Experts()
opt = torch.optim.Adam(model.parameters(), lr=0.03)
for step in range(9):
    rows = torch.arange(step * 4, step * 4 + 6) % 40
    out, chosen = model(x[rows])
    loss = F.cross_entropy(out, y[rows])
    opt.zero_grad()
    loss.backward()
    idle = [i for i, e in enumerate(model.experts) if e[0].weight.grad is None]
    opt.step()
    print(f"loss {loss.item():.6g} chosen {chosen.tolist()} idle {idle} gate {model.gate.weight.grad.norm():.6g}")
torch.save(model.state_dict(), "model.pt")
