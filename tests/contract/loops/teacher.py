"""A frozen teacher, a student, two averages of it, and validation without gradients."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

call = globals().get("call", lambda module, *args: module(*args))
fused = globals().get("fused")


def network(width):
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 4))


@torch.no_grad()
def validate(model, x):
    model.eval()
    found = call(model, x)
    model.train()
    return found


torch.manual_seed(0)
teacher, student = network(32).eval().requires_grad_(False), network(16)
optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, fused=fused)
held_out = torch.randn(16, 8)
losses = [validate(student, held_out).square().mean().item()]
ema = copy.deepcopy(student).requires_grad_(False)
averaged = AveragedModel(student, multi_avg_fn=get_ema_multi_avg_fn(0.9))
for _ in range(20):
    x = torch.randn(16, 8)
    with torch.no_grad():
        target = call(teacher, x)
    loss = nn.functional.mse_loss(call(student, x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    averaged.update_parameters(student)
    with torch.no_grad():
        for mean, value in zip(ema.parameters(), student.parameters(), strict=True):
            mean.lerp_(value, 0.1)
    losses += [loss.item(), validate(student, held_out).mean().item()]
by_ema, by_average = validate(ema, held_out), validate(averaged, held_out)
assert not torch.allclose(by_ema, validate(student, held_out), atol=1e-4), "not its own weights"

result = {**student.state_dict(), "ema": by_ema, "averaged": by_average}
