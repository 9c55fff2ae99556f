"""MAML: learns a start from which one gradient step fits a sine, by functional_call."""
import torch
import torch.nn as nn
from torch.func import functional_call

torch.manual_seed(17)
model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
meta_optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
inner_lr, tasks, shots = 0.05, 3, 10


def sample_task():
    amplitude, phase = torch.rand(1) * 2 + 0.5, torch.rand(1) * 3
    x = torch.rand(2, shots, 1) * 6 - 3
    return x, amplitude * torch.sin(x + phase)


for iteration in range(22):
    meta_loss = 0.0
    for _ in range(tasks):
        (x_support, x_query), (y_support, y_query) = sample_task()
        if iteration == 6:
            y_query = y_query * 1e4
        params = dict(model.named_parameters())
        support_loss = nn.functional.mse_loss(
            functional_call(model, params, (x_support,)), y_support
        )
        grads = torch.autograd.grad(support_loss, params.values(), create_graph=True)
        fast = {name: p - inner_lr * g for (name, p), g in zip(params.items(), grads)}
        prediction = functional_call(model, fast, (x_query,))
        meta_loss = meta_loss + nn.functional.mse_loss(prediction, y_query)
    meta_loss = meta_loss / tasks
    meta_optimizer.zero_grad()
    meta_loss.backward()
    meta_optimizer.step()
    if iteration % 7 == 0:
        print(f"iteration {iteration}: meta loss {meta_loss.item():.6f}")

print(f"final loss {meta_loss.item():.9g}")
torch.save({"model": model.state_dict(), "optimizer": meta_optimizer.state_dict()}, "model.pt")
