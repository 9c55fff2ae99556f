"""Soft actor-critic's squashed policy with a learned temperature."""
import torch
from torch import nn
from torch.distributions import Normal


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))

    def sample(self, s):
        mu, log_std = self.net(s).chunk(2, -1)
        d = Normal(mu, log_std.clamp(-5, 2).exp())
        u = d.rsample()
        a = torch.tanh(u)
        return a, (d.log_prob(u) - torch.log(1 - a.pow(2) + 1e-6)).sum(-1)


torch.manual_seed(90)
policy, q = Policy(), nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
log_alpha = torch.zeros(1, requires_grad=True)
opts = {
    "pi": torch.optim.Adam(policy.parameters(), lr=3e-3),
    "q": torch.optim.Adam(q.parameters(), lr=3e-3),
    "alpha": torch.optim.Adam([log_alpha], lr=1e-2),
}
for step in range(5):
    s = torch.randn(16, 2)
    with torch.no_grad():
        a, _ = policy.sample(s)
        goal = -(a - s[:, :1]).square()
    losses = {"q": nn.functional.mse_loss(q(torch.cat([s, a], 1)), goal)}
    new, logp = policy.sample(s)
    losses["pi"] = (log_alpha.exp().detach() * logp - q(torch.cat([s, new], 1)).squeeze(1)).mean()
    losses["alpha"] = -(log_alpha * (logp.detach() - 1.0)).mean()
    for name, loss in losses.items():
        opts[name].zero_grad()
        loss.backward(inputs=[p for g in opts[name].param_groups for p in g["params"]])
    for opt in opts.values():
        opt.step()
    print(step, *(losses[k].item().hex() for k in sorted(losses)))
