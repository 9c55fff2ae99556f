"""An ensemble as one stacked model: torch.func.stack_module_state, vmap, one optimizer."""
import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

torch.manual_seed(3)
x, t = torch.randn(29, 4), torch.randn(29, 1)
members = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)) for _ in range(3)]
params, buffers = stack_module_state(members)
base = copy.deepcopy(members[0]).to("meta")
opt = torch.optim.SGD(params.values(), lr=0.1)


def one(p, b, batch):
    return functional_call(base, (p, b), (batch,))


for step in range(7):
    rows = torch.randperm(29)[:9]
    out = vmap(one, in_dims=(0, 0, None))(params, buffers, x[rows])
    loss = sum(F.mse_loss(o, t[rows]) for o in out)
    diversity = out.std(0).mean()
    opt.zero_grad()
    (loss - 0.1 * diversity).backward()
    opt.step()
    print(f"loss {loss.item():.6g} diversity {diversity.item():.6g} g {params['0.weight'].grad.norm():.6g}")
with torch.no_grad():
    for i, m in enumerate(members):
        m.load_state_dict({k: v[i] for k, v in params.items()})
    print("alone", *(f"{F.mse_loss(m(x), t).item():.6g}" for m in members))
torch.save({k: v.detach() for k, v in params.items()}, "model.pt")
