"""Models that take an object of the script's own, texts or nothing at all in place of tensors."""
import torch
import torch.nn.functional as F
from torch import nn


class Batch:
    def __init__(self, x, y):
        self.x, self.y = x, y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, batch):
        return self.body(batch.x) * self.scale


class Texts(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(128, 8), nn.Linear(8, 8)

    def forward(self, texts):
        return torch.stack([self.embed(torch.tensor(list(map(ord, t)))).mean(0) for t in texts])


class Prototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8) * 0.3)

    def forward(self):
        return F.normalize(self.weight, dim=1)


torch.manual_seed(23)
net, texts, prototypes = Net(), Texts(), Prototypes()
models = nn.ModuleList([net, texts, prototypes])
opt = torch.optim.Adam(models.parameters(), lr=0.03)
words = ["ranks", "rows", "a", "batch", "of", "texts"]
for step in range(9):
    batch = Batch(torch.randn(6, 6), torch.randint(0, 4, (6,)))
    hidden = net(batch) + texts(words[step % 3 :] + words[: step % 3])
    loss = F.cross_entropy(hidden @ prototypes().t(), batch.y) + 0.1 * texts.mix(hidden).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"loss {loss.item():.6g} scale {net.scale.grad.norm():.6g}")
torch.save(models.state_dict(), "model.pt")
