"""Parts are frozen and thawed, BatchNorm among them; groups are added; some gradients stay None."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(2)
x, y = torch.randn(32, 5), torch.randint(0, 3, (32,))
body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
model = nn.Sequential(body, nn.Tanh(), nn.Linear(6, 3))
body.requires_grad_(False)
opt = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
for step in range(12):
    model.train()
    if step == 3:
        body[3].requires_grad_(True)
        opt.add_param_group({"params": body[3].parameters(), "lr": 0.03})
    if step == 6:
        body[:2].requires_grad_(True)
        opt.add_param_group({"params": body[:2].parameters(), "lr": 0.01})
    if step >= 8:
        body[1].eval()
    if step == 10:
        model[2].requires_grad_(False)
    rows = torch.randperm(32)[:10]
    loss = F.cross_entropy(model(x[rows]), y[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    have = [n for n, p in model.named_parameters() if p.grad is not None]
    norm = sum(p.grad.norm() for p in model.parameters() if p.grad is not None)
    print(f"{step} loss {loss.item():.6g} with {len(have)} norm {norm:.6g} var {body[1].running_var[0]:.6g}")
torch.save(model.state_dict(), "model.pt")
