"""SWA by AveragedModel with its own learning rate, update_bn at the end, EMA by its avg_fn beside it."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(149)
x = torch.randn(37, 5)
y = x.argmax(1) % 3
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
net = nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))
swa, ema = AveragedModel(net), AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
opt = torch.optim.SGD(net.parameters(), lr=0.2)
plan = SWALR(opt, swa_lr=0.05, anneal_epochs=2)
for epoch in range(4):
    for a, b in loader:
        loss = F.cross_entropy(net(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update_parameters(net)
    if epoch >= 2:
        swa.update_parameters(net)
        plan.step()
    print(f"{epoch} loss {loss.item():.6g} lr {opt.param_groups[0]['lr']:.6g} n {swa.n_averaged.item()}")
update_bn(loader, swa)
for name, model in (("net", net), ("swa", swa), ("ema", ema)):
    model.eval()
    with torch.no_grad():
        out = torch.cat([model(x[i : i + 10]) for i in range(0, 37, 10)])
    print(name, f"{F.cross_entropy(out, y).item():.6g} {(out.argmax(1) == y).float().mean():.6g}")
torch.save([m.state_dict() for m in (net, swa, ema)], "model.pt")
