"""REINFORCE with a baseline on a contextual bandit."""
import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(26)
policy = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
table = torch.randn(3, 4)
baseline = 0.0
for episode in range(8):
    context = torch.eye(3)[torch.randint(3, (20,))]
    dist = Categorical(logits=policy(context))
    action = dist.sample()
    reward = (context @ table).gather(1, action[:, None]).squeeze(1)
    advantage = reward - baseline
    baseline = 0.9 * baseline + 0.1 * reward.mean().item()
    loss = -(dist.log_prob(action) * advantage).mean() - 0.01 * dist.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(episode, loss.item().hex(), reward.mean().item().hex())
