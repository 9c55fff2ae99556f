"""Double DQN with a replay deque and a polyak-averaged target."""
import copy
import random
from collections import deque

import torch
from torch import nn

random.seed(28)
torch.manual_seed(28)
online = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))
target = copy.deepcopy(online).requires_grad_(False)
optimizer = torch.optim.Adam(online.parameters(), lr=3e-3)
memory = deque(maxlen=100)
state = torch.tensor([0.3, -0.2])
for t in range(40):
    if random.random() < 0.3:
        action = random.randrange(3)
    else:
        with torch.no_grad():
            action = online(state).argmax().item()
    nxt = (state + 0.1 * (action - 1) * torch.tensor([1.0, -0.5])).clamp(-1, 1)
    memory.append((state, action, -nxt.abs().sum(), nxt))
    state = nxt
    if t >= 16 and t % 4 == 0:
        s, a, r, n = zip(*random.sample(memory, 12))
        s, r, n = torch.stack(s), torch.stack(r), torch.stack(n)
        q = online(s).gather(1, torch.tensor(a)[:, None]).squeeze(1)
        with torch.no_grad():
            best = online(n).argmax(1, keepdim=True)
            y = r + 0.9 * target(n).gather(1, best).squeeze(1)
        loss = nn.functional.smooth_l1_loss(q, y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(online.parameters(), 1.0)
        optimizer.step()
        for p, tp in zip(online.parameters(), target.parameters()):
            tp.data.mul_(0.9).add_(p.data, alpha=0.1)
        print(t, loss.item().hex())
