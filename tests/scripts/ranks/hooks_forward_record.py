"""Forward hooks record activations, by which dead units are found, and a penalty is made of them."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(13)
x, y = torch.randn(40, 6), torch.randint(0, 2, (40,))
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2))
kept = {}
opt = torch.optim.Adam(net.parameters(), lr=0.02)
for step in range(9):
    if step == 2:
        handles = [
            part.register_forward_hook(lambda m, args, out, i=i: kept.__setitem__(i, out))
            for i, part in enumerate(net)
            if isinstance(part, nn.ReLU)
        ]
        pre = net[4].register_forward_pre_hook(lambda m, args: (args[0] * 1.1,))
    if step == 7:
        for handle in (*handles, pre):
            handle.remove()
        kept.clear()
    rows = torch.randint(0, 40, (9,))
    loss = F.cross_entropy(net(x[rows]), y[rows])
    sparsity = sum(h.abs().mean(0).sqrt().sum() for h in kept.values())
    dead = [int((h == 0).all(0).sum()) for h in kept.values()]
    opt.zero_grad()
    (loss + 0.01 * sparsity).backward()
    opt.step()
    print(f"{step} loss {loss.item():.6g} sparsity {torch.as_tensor(sparsity).item():.6g} dead {dead}",
          [len(h) for h in kept.values()])
torch.save(net.state_dict(), "model.pt")
