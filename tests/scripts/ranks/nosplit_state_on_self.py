"""forward keeps its own last hidden state, a memory of rows and a history list from call to call."""
import torch
from torch import nn


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(3, 5), nn.Linear(10, 1)
        self.state, self.history, self.memory, self.calls = None, [], torch.zeros(0, 5), 0

    def forward(self, x):
        if self.state is None or len(self.state) != len(x):
            self.state = torch.zeros(len(x), 5)
        self.calls += 1
        self.state = self.cell(x, self.state.detach())
        recalled = self.memory.mean(0).expand(len(x), 5) if len(self.memory) else torch.zeros(len(x), 5)
        self.memory = torch.cat([self.memory, self.state.detach()])[-13:]
        self.history.append(self.state.detach().mean().item())
        return self.out(torch.cat([self.state, recalled], 1))


torch.manual_seed(6)
series = torch.randn(20, 7, 3).cumsum(0)
net = Memory()
opt = torch.optim.Adam(net.parameters(), lr=0.02)
for t in range(12):
    x = series[t] if t < 8 else series[t, :4]
    loss = (net(x) - series[t + 1, : len(x), :1]).abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"{net.calls} loss {loss.item():.6g} state {net.state.norm().item():.6g} "
          f"memory {tuple(net.memory.shape)} {net.memory.sum():.6g}")
print("history", *(f"{h:.6g}" for h in net.history))
torch.save([net.state_dict(), net.memory, net.history], "model.pt")
