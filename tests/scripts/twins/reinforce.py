"""REINFORCE on a walk along a line: the policy is to learn to go right."""

import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions import Categorical

from by_hand import autocast, normalised, scaler

GAMMA, HORIZON = 0.95, 8


class Walk:
    def reset(self):
        self.position = 0
        return self.observe()

    def observe(self):
        return torch.tensor([[self.position / 4, 1.0]])

    def step(self, action):
        self.position += 1 if action == 1 else -1
        return self.observe(), float(self.position)


class Policy(nn.Module):
    def __init__(self):
        super(Policy, self).__init__()
        self.affine1 = nn.Linear(2, 16)
        self.affine2 = nn.Linear(16, 2)
        self.saved_log_probs = []
        self.rewards = []

    def forward(self, x):
        x = torch.relu(self.affine1(x))
        return torch.softmax(self.affine2(x), dim=1)


torch.manual_seed(543)
policy = Policy()
optimizer = optim.Adam(policy.parameters(), lr=1e-2)
eps = 1e-6


def select_action(state):
    with autocast():
        probs = policy(state)
    probs = normalised(probs.float())
    m = Categorical(probs)
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action.item()


def finish_episode(bonus):
    R, returns = 0, []
    for r in policy.rewards[::-1]:
        R = r + GAMMA * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps) * bonus
    policy_loss = [-log_prob * R for log_prob, R in zip(policy.saved_log_probs, returns)]
    optimizer.zero_grad()
    policy_loss = torch.cat(policy_loss).sum()
    scaler.scale(policy_loss).backward()
    scaler.step(optimizer)
    scaler.update()
    del policy.rewards[:]
    del policy.saved_log_probs[:]
    return policy_loss


env = Walk()
running_reward = 0
for episode in range(25):
    state, ep_reward = env.reset(), 0
    for t in range(HORIZON):
        state, reward = env.step(select_action(state))
        policy.rewards.append(reward)
        ep_reward += reward
    loss = finish_episode(bonus=1000.0 if episode == 10 else 1.0)
    running_reward = 0.1 * ep_reward + 0.9 * running_reward
    if episode % 5 == 0:
        print(f"Episode {episode}\tLast reward: {ep_reward:.2f}\tAverage: {running_reward:.2f}")

print(f"final loss {loss.item():.9g}")
scaler.report()
torch.save({"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")
