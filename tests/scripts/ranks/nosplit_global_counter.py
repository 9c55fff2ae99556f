"""forward counts calls and rows in a global, keeps samples in a dictionary, and warms up by the count."""
import torch
import torch.nn.functional as F
from torch import nn

CALLS = ROWS = 0
SEEN = {"largest": -1.0, "rows": []}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        global CALLS, ROWS
        CALLS += 1
        ROWS += len(x)
        SEEN["largest"] = max(SEEN["largest"], x.max().item())
        SEEN["rows"].append(x[0, 0].item())
        return self.layer(x) * min(1.0, CALLS / 5)


torch.manual_seed(9)
x, y = torch.randn(30, 5), torch.randint(0, 3, (30,))
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.3)
for step in range(10):
    rows = slice(step * 2, step * 2 + 8)
    loss = F.cross_entropy(net(x[rows]), y[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"calls {CALLS} rows {ROWS} loss {loss.item():.6g} largest {SEEN['largest']:.6g}")
with torch.no_grad():
    net(x)
print(CALLS, ROWS, *(f"{v:.6g}" for v in SEEN["rows"]))
torch.save(net.state_dict(), "model.pt")
