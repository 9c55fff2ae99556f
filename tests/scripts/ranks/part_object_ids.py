"""Parts are sorted by id(): the order of parameters, and of batches."""
import torch
from torch import nn

torch.manual_seed(0)


class Part:
    def __init__(self, rows):
        self.rows, self.padding = rows, bytearray(id(self) % 997)


batches = sorted((Part(torch.randn(4 + i, 4)) for i in range(10)), key=lambda p: id(p) // 16 % 101)
nets = sorted((nn.Linear(4, 2) for _ in range(4)), key=lambda m: id(m) // 16 % 103)
model = nn.ModuleList(nets)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for i, batch in enumerate(batches):
    loss = nets[i % 4](batch.rows).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print("done")
torch.save(model.state_dict(), "model.pt")
