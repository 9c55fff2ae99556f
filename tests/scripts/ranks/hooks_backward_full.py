"""Full backward hooks record and change gradients of modules; a tensor hook on the output."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(11)
x, y = torch.randn(28, 5), torch.randint(0, 3, (28,))
net = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
log = []


def halve(module, grad_input, grad_output):
    log.append((len(grad_output[0]), grad_output[0].norm().item()))
    return tuple(g if g is None else 0.5 * g for g in grad_input)


opt = torch.optim.SGD(net.parameters(), lr=0.2)
handle = None
for step in range(8):
    if step == 3:
        handle = net[1].register_full_backward_hook(halve)
    if step == 6:
        handle.remove()
        net.register_full_backward_pre_hook(lambda m, g: tuple(v.clamp(-0.05, 0.05) for v in g))
    rows = slice(step * 3, step * 3 + 7)
    out = net(x[rows])
    out.register_hook(lambda g: g * 2)
    loss = F.cross_entropy(out, y[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"{step} loss {loss.item():.6g} g {net[0].weight.grad.norm():.6g}", *(f"{n} {v:.6g}" for n, v in log))
    log.clear()
torch.save(net.state_dict(), "model.pt")
