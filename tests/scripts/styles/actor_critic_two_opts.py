"""DDPG: deterministic actor, critic on concatenated inputs, soft targets, exploration noise."""
import copy

import torch
from torch import nn


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, s, a):
        return self.net(torch.cat([s, a], -1))


def soft_update(target, source, tau=0.1):
    for t, s in zip(target.parameters(), source.parameters()):
        t.data.copy_((1 - tau) * t.data + tau * s.data)


torch.manual_seed(89)
actor = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1), nn.Tanh())
critic = Critic()
actor_t, critic_t = copy.deepcopy(actor), copy.deepcopy(critic)
opt_a = torch.optim.Adam(actor.parameters(), lr=1e-3)
opt_c = torch.optim.Adam(critic.parameters(), lr=3e-3)
s = torch.randn(32, 3)
for step in range(6):
    with torch.no_grad():
        a = (actor(s) + 0.2 * torch.randn(32, 1)).clamp(-1, 1)
        s2 = 0.9 * s + 0.1 * a
        r = -s2.square().sum(1, keepdim=True)
        target = r + 0.9 * critic_t(s2, actor_t(s2))
    critic_loss = nn.functional.mse_loss(critic(s, a), target)
    opt_c.zero_grad()
    critic_loss.backward()
    opt_c.step()
    actor_loss = -critic(s, actor(s)).mean()
    opt_a.zero_grad()
    actor_loss.backward()
    opt_a.step()
    soft_update(actor_t, actor)
    soft_update(critic_t, critic)
    s = s2
    print(step, critic_loss.item().hex(), actor_loss.item().hex())
