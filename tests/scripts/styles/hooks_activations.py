"""Forward hooks keep activations for a penalty, backward hooks print gradient norms."""
import torch
from torch import nn

torch.manual_seed(19)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
activations, norms = {}, {}


def keep(name):
    def hook(module, inputs, output):
        activations[name] = output
    return hook


def note(name):
    def hook(module, grad_input, grad_output):
        norms[name] = grad_output[0].norm().item()
    return hook


handles = []
for name, layer in model.named_children():
    if isinstance(layer, nn.ReLU):
        handles.append(layer.register_forward_hook(keep(name)))
    if isinstance(layer, nn.Linear):
        handles.append(layer.register_full_backward_hook(note(name)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x, y = torch.randn(15, 6), torch.randint(3, (15,))
for step in range(5):
    if step == 3:
        for handle in handles[:2]:
            handle.remove()
    activations.clear()
    loss = nn.functional.cross_entropy(model(x), y)
    loss = loss + 1e-2 * sum(a.float().abs().mean() for a in activations.values())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), len(activations), *(v.hex() for v in norms.values()))
