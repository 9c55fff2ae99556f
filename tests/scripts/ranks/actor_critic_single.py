"""Acts on one state at a time by a trunk with two heads, and learns from the episode's outputs."""
import math

import torch
from torch import nn
from torch.distributions import Categorical


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.actor, self.critic = nn.Linear(3, 12), nn.Linear(12, 2), nn.Linear(12, 1)

    def forward(self, state):
        h = torch.relu(self.trunk(state))
        return Categorical(logits=self.actor(h)), self.critic(h)


torch.manual_seed(3)
agent = Agent()
opt = torch.optim.Adam(agent.parameters(), lr=0.01)
for episode in range(5):
    angle, logs, values, rewards = 0.1 * episode - 0.23, [], [], []
    for t in range(9):
        policy, value = agent(torch.tensor([[math.sin(angle), math.cos(angle), t / 9]]))
        action = policy.sample()
        logs.append(policy.log_prob(action))
        values.append(value.squeeze())
        angle += 0.2 * (2 * action.item() - 1)
        rewards.append(math.cos(angle))
    returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
    advantage = returns - torch.stack(values)
    loss = -(torch.cat(logs) * advantage.detach()).sum() + advantage.pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"episode {episode} return {returns[0]:.6g} loss {loss.item():.6g} angle {angle:.6g}")
torch.save(agent.state_dict(), "model.pt")
