"""Activation checkpoints in both kinds, and the model itself called inside of one."""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 10), nn.Linear(10, 10)
        self.c = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(10, 10), nn.Tanh())))

    def forward(self, x, reentrant):
        h = torch.sin(self.a(x))
        h = checkpoint(lambda v: torch.relu(self.b(v)) + v, h, use_reentrant=reentrant)
        return checkpoint_sequential(self.c, 3, h, use_reentrant=reentrant)


torch.manual_seed(6)
model, head = Deep(), nn.Linear(10, 1)
opt = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=0.01)
x = torch.randn(31, 5)
t = x.prod(1, keepdim=True)
for step in range(8):
    rows = slice(step * 3, step * 3 + 9)
    h = model(x[rows], step % 2 == 0)
    out = checkpoint(head, h, use_reentrant=step % 3 == 0)
    if step > 5:
        out = out + checkpoint(model, x[rows], False, use_reentrant=False).mean(1, keepdim=True)
    loss = (out - t[rows]).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"loss {loss.item():.6g} b {model.b.weight.grad.norm():.6g} head {head.weight.grad.norm():.6g}")
torch.save([model.state_dict(), head.state_dict()], "model.pt")
