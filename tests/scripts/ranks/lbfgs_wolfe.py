"""LBFGS with a line search, which calls its closure as often as it likes; double precision."""
import torch
from torch import nn

torch.manual_seed(47)
torch.set_default_dtype(torch.float64)
try:
    x = torch.linspace(-2, 2, 25)[:, None]
    t = x.sin() + 0.3 * x
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    opt = torch.optim.LBFGS(net.parameters(), lr=1, max_iter=4, line_search_fn="strong_wolfe")
    calls = 0

    def closure():
        global calls
        calls += 1
        opt.zero_grad()
        loss = (net(x) - t).pow(2).mean() + 1e-4 * sum(p.pow(2).sum() for p in net.parameters())
        loss.backward()
        return loss

    for step in range(5):
        before = opt.step(closure)
        print(f"step {step} loss {before.item():.6g} calls {calls} g {net[0].weight.grad.norm():.6g}")
    torch.save(net.state_dict(), "model.pt")
finally:
    torch.set_default_dtype(torch.float32)
