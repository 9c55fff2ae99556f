"""REINFORCE with sampled actions in batches of environments, entropy, a running baseline."""
import torch
from torch import nn
from torch.distributions import Normal

torch.manual_seed(193)
policy = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
opt = torch.optim.Adam(policy.parameters(), lr=0.02)
baseline = 0.0
for update in range(5):
    position, velocity = torch.randn(7), torch.zeros(7)
    logs, rewards, entropy = [], [], 0.0
    alive = torch.ones(7, dtype=torch.bool)
    for t in range(6):
        mean, log_std = policy(torch.stack([position, velocity], 1)[alive]).unbind(1)
        normal = Normal(mean, log_std.clamp(-2, 1).exp())
        action = normal.sample()
        logs.append((normal.log_prob(action), alive.clone()))
        entropy = entropy + normal.entropy().mean() / 6
        velocity[alive] += 0.3 * action
        position = position + 0.3 * velocity
        rewards.append(torch.where(alive, -position.abs(), torch.zeros(())))
        alive = alive & (position.abs() < 3)
        if not alive.any():
            break
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    loss = sum(-(log * (returns[t][who] - baseline)).sum() for t, (log, who) in enumerate(logs)) / 7
    opt.zero_grad()
    (loss - 0.01 * entropy).backward()
    opt.step()
    baseline = 0.8 * baseline + 0.2 * returns[0].mean().item()
    print(f"loss {loss.item():.6g} return {returns[0].mean():.6g} alive {alive.sum()} steps {len(logs)} "
          f"entropy {entropy.item():.6g}")
torch.save(policy.state_dict(), "model.pt")
