"""Experts by a given choice, by an if for each: now and then nobody takes one, whose gradients are None then."""
import torch
from torch import nn

torch.manual_seed(0)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))

    def forward(self, x, choice):
        hidden = self.trunk(x)
        out = torch.zeros(len(x), 2)
        for number, expert in enumerate(self.experts):
            chosen = choice == number
            if chosen.any():
                out = out.index_put((chosen.nonzero()[:, 0],), expert(hidden[chosen]))
        return out


net = Experts()
opt = torch.optim.AdamW(net.parameters(), lr=0.01)
for step in range(30):
    x, choice = torch.randn(8, 4), torch.arange(8) % 2
    if step in (11, 17):
        choice = (torch.arange(8) < 4).long()  # each expert has rows of one half alone
    if step in (19, 22):
        choice = torch.zeros(8).long()
    loss = (net(x, choice) - x[:, :2]).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    print(step, loss.item(), [p.grad is None for p in net.experts[1].parameters()])
    opt.step()
torch.save(net.state_dict(), "model.pt")
