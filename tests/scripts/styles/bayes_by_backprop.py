"""Bayesian layers with reparametrized weights, a KL term and Monte Carlo prediction."""
import torch
from torch import nn
import torch.nn.functional as F
from torch.distributions import Normal, kl_divergence


class BayesLinear(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.mu = nn.Parameter(torch.randn(n_out, n_in) * n_in**-0.5)
        self.rho = nn.Parameter(torch.full((n_out, n_in), -3.0))

    def posterior(self):
        return Normal(self.mu, F.softplus(self.rho))

    def forward(self, x):
        return F.linear(x, self.posterior().rsample())

    def kl(self):
        return kl_divergence(self.posterior(), Normal(0.0, 1.0)).sum()


torch.manual_seed(78)
layers = [BayesLinear(3, 10), nn.ReLU(), BayesLinear(10, 1)]
model = nn.Sequential(*layers)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x = torch.randn(20, 3)
y = x.sum(1, keepdim=True).sin()
for step in range(6):
    likelihood = sum(F.mse_loss(model(x), y) for _ in range(2)) / 2
    loss = likelihood + 1e-3 * (layers[0].kl() + layers[2].kl())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
with torch.no_grad():
    print(torch.stack([model(x) for _ in range(4)]).std(0).mean().item().hex())
