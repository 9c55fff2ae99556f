"""Lion, written as a torch.optim.Optimizer with a decoupled decay."""
import torch
from torch import nn
from torch.optim import Optimizer


class Lion(Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                m = state["m"]
                p.add_((m * b1 + p.grad * (1 - b1)).sign_(), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - b2)


torch.manual_seed(71)
model = nn.Sequential(nn.Linear(4, 12), nn.GELU(), nn.Linear(12, 3))
optimizer = Lion(model.parameters(), lr=1e-2, weight_decay=0.1)
x, y = torch.randn(18, 4), torch.randint(3, (18,))
for step in range(6):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
