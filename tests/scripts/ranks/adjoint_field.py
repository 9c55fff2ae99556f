"""A neural ODE by the adjoint method: its field is called without gradients, and then in a backward of its own."""
import torch
from torch import nn


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, t, y):
        return self.net(y) * (1 + t)


class Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, field, y, steps, *params):
        with torch.no_grad():
            for i in range(steps):
                y = y + field(i / steps, y) / steps
        ctx.field, ctx.steps, ctx.params = field, steps, params
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,), found = ctx.saved_tensors, [torch.zeros_like(p) for p in ctx.params]
        for i in reversed(range(ctx.steps)):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                slope = ctx.field(i / ctx.steps, y)
                of_y, *of_params = torch.autograd.grad(slope, [y, *ctx.params], grad)
            y, grad = y - slope.detach() / ctx.steps, grad + of_y / ctx.steps
            found = [g + new / ctx.steps for g, new in zip(found, of_params)]
        return None, grad, None, *found


torch.manual_seed(0)
x = torch.randn(24, 3)
field, head = Field(), nn.Linear(3, 3)
params = [*field.parameters(), *head.parameters()]
opt = torch.optim.Adam(params, lr=0.02)
for step in range(6):
    rows = torch.randperm(24)[:7]
    z = Adjoint.apply(field, x[rows], 4, *field.parameters())
    loss = (head(z) - 0.5 * x[rows].roll(1, 1)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step} loss {loss.item():.6g} norm {torch.cat([p.grad.flatten() for p in params]).norm():.6g}")
torch.save([field.state_dict(), head.state_dict()], "model.pt")
