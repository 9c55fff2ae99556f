"""An ensemble of models by torch.func.stack_module_state and vmap."""
import copy

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

torch.manual_seed(14)
models = [nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(4)]
params, buffers = stack_module_state(models)
params = {k: v.detach() for k, v in params.items()}
base = copy.deepcopy(models[0]).to("meta")
x = torch.randn(4, 16, 2)
y = (x**2).sum(-1, keepdim=True)


def loss_fn(p, b, x, y):
    return ((functional_call(base, (p, b), (x,)) - y) ** 2).mean()


for step in range(5):
    grads, losses = vmap(grad_and_value(loss_fn))(params, buffers, x, y)
    params = {k: v - 0.05 * grads[k] for k, v in params.items()}
    print(step, *(loss.item().hex() for loss in losses))
