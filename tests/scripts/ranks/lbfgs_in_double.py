"""Logistic regression by L-BFGS with a line search in fp64; steps hold their state meanwhile."""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

torch.manual_seed(0)
features = torch.randn(40, 5, dtype=torch.float64)
labels = (features @ torch.randn(5, 1, dtype=torch.float64) > 0.3).double()
regression = torch.nn.Linear(5, 1, dtype=torch.float64)
solver = torch.optim.LBFGS(regression.parameters(), max_iter=3, line_search_fn="strong_wolfe")
calls = 0


def cost():
    global calls
    calls += 1
    solver.zero_grad()
    total = cross_entropy(regression(features), labels) + 1e-3 * regression(features).square().mean()
    total.backward()
    return total


for round_ in range(5):
    print(f"round {round_} cost {solver.step(cost).item():.10f} after {calls} calls")
torch.save(regression.state_dict(), "model.pt")
