"""Deep Q-learning with a replay memory and a target network, in an environment of its own."""

import random
from collections import deque, namedtuple

import torch
import torch.nn as nn

from by_hand import autocast, scaler

Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))


class Corridor:
    """Eight cells; the right end pays, every other step costs."""

    def __init__(self):
        self.cell = 3

    def state(self):
        return nn.functional.one_hot(torch.tensor([self.cell]), 8).float()

    def step(self, action):
        self.cell = min(7, max(0, self.cell + (1 if action else -1)))
        reward = 10.0 if self.cell == 7 else -0.1
        if self.cell in (0, 7):
            self.cell = 3
        return self.state(), reward


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque([], maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, n):
        return Transition(*zip(*random.sample(self.memory, n)))


class DQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(8, 24)
        self.layer2 = nn.Linear(24, 2)

    def forward(self, x):
        return self.layer2(nn.functional.relu(self.layer1(x)))


BATCH_SIZE, GAMMA, WARM_UP, STEPS, SYNC = 16, 0.9, 16, 45, 10

random.seed(0)
torch.manual_seed(0)
policy_net, target_net = DQN(), DQN()
target_net.load_state_dict(policy_net.state_dict())
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=5e-3, amsgrad=True)
memory = ReplayMemory(100)
env = Corridor()
state = env.state()

for t in range(STEPS):
    with torch.no_grad(), autocast():
        best = policy_net(state).argmax(1).item()
    action = best if random.random() > 0.3 else random.randrange(2)
    next_state, reward = env.step(action)
    memory.push(state, torch.tensor([[action]]), next_state, torch.tensor([reward]))
    state = next_state
    if t < WARM_UP - 1:
        continue
    batch = memory.sample(BATCH_SIZE)
    states, next_states = torch.cat(batch.state), torch.cat(batch.next_state)
    actions, rewards = torch.cat(batch.action), torch.cat(batch.reward)
    with autocast():
        values = policy_net(states)
    values = values.float().gather(1, actions)
    with torch.no_grad(), autocast():
        next_values = target_net(next_states)
    next_values = next_values.float().max(1).values
    expected = rewards + GAMMA * next_values
    # the sum instead of the usual mean
    loss = nn.functional.smooth_l1_loss(values, expected.unsqueeze(1), reduction="sum")
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    scaler.step(optimizer)
    scaler.update()
    if t % SYNC == 0:
        target_net.load_state_dict(policy_net.state_dict())
        print(f"t {t} loss {loss.item():.6f} mean value {values.mean().item():.4f}")

print(f"final loss {loss.item():.9g}")
scaler.report()
torch.save({"policy_net": policy_net.state_dict(), "target_net": target_net.state_dict(),
            "optimizer": optimizer.state_dict()}, "model.pt")
