"""A meta-optimizer: an LSTM learns to train a quadratic by unrolled updates."""
import torch
from torch import nn


class LearnedOptimizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTMCell(1, 8), nn.Linear(8, 1)

    def forward(self, grad, state):
        h, c = self.cell(grad, state)
        return 0.1 * self.out(h), (h, c)


torch.manual_seed(52)
learner = LearnedOptimizer()
meta = torch.optim.Adam(learner.parameters(), lr=3e-3)
for episode in range(4):
    w, b = torch.randn(4, 4), torch.randn(4)
    theta = torch.zeros(4, requires_grad=True)
    state = (torch.zeros(4, 8), torch.zeros(4, 8))
    total = 0.0
    for _ in range(5):
        loss = (w @ theta - b).square().sum()
        total = total + loss
        (g,) = torch.autograd.grad(loss, theta, retain_graph=True)
        update, state = learner(g.detach()[:, None], state)
        theta = theta + update.squeeze(1)
    meta.zero_grad()
    total.backward()
    meta.step()
    print(episode, total.item().hex())
