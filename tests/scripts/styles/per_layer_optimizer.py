"""The optimizer step runs in backward: one optimizer for each parameter, by a hook."""
import torch
from torch import nn

torch.manual_seed(12)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
optimizers = {p: torch.optim.Adam([p], lr=5e-3, foreach=False) for p in model.parameters()}
done = []


def step_now(p):
    optimizers[p].step()
    optimizers[p].zero_grad()
    done.append(p.numel())


for p in model.parameters():
    p.register_post_accumulate_grad_hook(step_now)

x, y = torch.randn(10, 8), torch.randint(2, (10,))
for step in range(5):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    print(step, loss.item().hex(), sum(done))
print(sum(p.detach().double().sum().item() for p in model.parameters()).hex())
