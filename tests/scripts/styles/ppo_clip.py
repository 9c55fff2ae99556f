"""PPO: rollouts under no_grad, several epochs over them, clipped ratio and value loss."""
import torch
from torch import nn
from torch.distributions import Normal


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.pi = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.v = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.log_std = nn.Parameter(torch.zeros(1))

    def forward(self, obs):
        return Normal(self.pi(obs), self.log_std.exp()), self.v(obs).squeeze(-1)


def rollout(model, n=24):
    obs = torch.zeros(2)
    memory = []
    with torch.no_grad():
        for _ in range(n):
            dist, value = model(obs[None])
            act = dist.sample()
            reward = -(obs[0] + act.item() - 0.5) ** 2
            memory.append((obs, act[0], dist.log_prob(act)[0], value[0], reward))
            obs = torch.stack([(obs[0] + 0.1 * act.item()).clamp(-1, 1), reward])
    return [torch.stack(column) for column in zip(*memory)]


torch.manual_seed(27)
model = ActorCritic()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)
for iteration in range(3):
    obs, acts, old_logp, values, rewards = rollout(model)
    adv = rewards - values
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    for epoch in range(2):
        for idx in torch.randperm(len(obs)).split(12):
            dist, value = model(obs[idx])
            ratio = (dist.log_prob(acts[idx]) - old_logp[idx]).exp().squeeze(-1)
            clipped = ratio.clamp(0.8, 1.2)
            pi_loss = -torch.min(ratio * adv[idx], clipped * adv[idx]).mean()
            loss = pi_loss + 0.5 * (value - rewards[idx]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    print(iteration, loss.item().hex(), rewards.mean().item().hex())
