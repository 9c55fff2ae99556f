"""Data pipes that shuffle and shard over ranks if there are any, without workers and with one."""
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

torch.manual_seed(53)
rows = [torch.randn(5) for _ in range(24)]
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(4):
    count, total = 0, 0.0
    pipe = IterableWrapper(rows).shuffle().sharding_filter()
    for batch in DataLoader(pipe, 6, num_workers=epoch // 3):
        loss = (net(batch[:, :4]) - batch[:, 4:]).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        count, total = count + len(batch), total + loss.item()
    print(f"epoch {epoch} rows {count} loss {total:.6g}")
torch.save(net.state_dict(), "model.pt")
