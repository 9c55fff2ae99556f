"""GradNorm: weights of tasks are trained by the norms of each task's gradient of the shared layer."""
import torch
import torch.nn.functional as F
from torch import nn


class Multi(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(5, 8)
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 1), "b": nn.Linear(8, 3)})

    def forward(self, x):
        h = torch.relu(self.shared(x))
        return {name: head(h) for name, head in self.heads.items()}


torch.manual_seed(19)
x, ta, tb = torch.randn(34, 5), torch.randn(34, 1), torch.randint(0, 3, (34,))
model, weights = Multi(), nn.Parameter(torch.ones(2))
opt, opt_w = torch.optim.Adam(model.parameters(), lr=0.01), torch.optim.SGD([weights], lr=0.05)
first = None
for step in range(8):
    rows = torch.randperm(34)[:9]
    out = model(x[rows])
    losses = torch.stack([F.mse_loss(out["a"], ta[rows]), F.cross_entropy(out["b"], tb[rows])])
    first = losses.detach() if first is None else first
    norms = torch.stack([
        torch.autograd.grad(w * loss, model.shared.weight, create_graph=True)[0].norm()
        for w, loss in zip(weights, losses)
    ])
    pace = losses.detach() / first
    wanted = (norms.mean() * (pace / pace.mean()) ** 0.5).detach()
    opt_w.zero_grad()
    weights.grad = torch.autograd.grad((norms - wanted).abs().sum(), weights, retain_graph=True)[0]
    opt.zero_grad()
    (weights.detach() * losses).sum().backward()
    opt.step()
    opt_w.step()
    weights.data.mul_(2 / weights.data.sum())
    print("losses", *(f"{v:.6g}" for v in (*losses.tolist(), *norms.tolist(), *weights.tolist())))
torch.save([model.state_dict(), weights.data], "model.pt")
