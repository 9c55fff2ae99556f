"""Double DQN: replay buffer, target network, epsilon-greedy by random, priorities by errors."""
import random

import torch
import torch.nn.functional as F
from torch import nn

random.seed(2)
torch.manual_seed(2)
q, target = (nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)) for _ in range(2))
target.load_state_dict(q.state_dict())
opt = torch.optim.Adam(q.parameters(), lr=5e-3)
buffer, state, greedy = [], [0.1, 0.0, 0.2, 0.0], 0
for t in range(60):
    if random.random() < max(0.1, 1 - t / 30):
        action = random.randrange(2)
    else:
        with torch.no_grad():
            action = int(q(torch.tensor(state)).argmax())  # one state without a batch
        greedy += 1
    force = 0.3 * (2 * action - 1)
    new = [state[0] + 0.1 * state[1], state[1] + force, state[2] - 0.1 * force, state[3] + 0.5 * state[2]]
    reward, done = 1 - abs(new[0]), abs(new[0]) > 1 or t % 25 == 24
    buffer.append((state, action, reward, new, float(done)))
    state = [0.1, 0.0, 0.2, 0.0] if done else new
    if len(buffer) >= 12 and t % 4 == 0:
        batch = random.choices(buffer, weights=range(1, len(buffer) + 1), k=8)
        s, a, r, s2, d = (torch.tensor(v) for v in zip(*batch))
        with torch.no_grad():
            best = q(s2).argmax(1, keepdim=True)
            wanted = r + 0.9 * (1 - d) * target(s2).gather(1, best)[:, 0]
        value = q(s).gather(1, a[:, None])[:, 0]
        loss = F.smooth_l1_loss(value, wanted, reduction="none").sum() / 8
        opt.zero_grad()
        loss.backward()
        opt.step()
        for p, o in zip(target.parameters(), q.parameters()):
            p.data.mul_(0.9).add_(o.data, alpha=0.1)
        print(f"t {t} loss {loss.item():.6g} td {(value - wanted).abs().max().item():.6g} greedy {greedy}")
torch.save(q.state_dict(), "model.pt")
