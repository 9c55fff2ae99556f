"""Dilated causal convolutions with gated units predict mu-law audio."""
import torch
from torch import nn
import torch.nn.functional as F


class WaveNet(nn.Module):
    def __init__(self, levels=16, ch=8, layers=3):
        super().__init__()
        self.embed = nn.Embedding(levels, ch)
        self.dilated = nn.ModuleList(nn.Conv1d(ch, 2 * ch, 2, dilation=2**i) for i in range(layers))
        self.mix = nn.ModuleList(nn.Conv1d(ch, ch, 1) for _ in range(layers))
        self.out = nn.Conv1d(ch, levels, 1)

    def forward(self, ids):
        h = self.embed(ids).transpose(1, 2)
        skip = 0
        for i, (conv, mix) in enumerate(zip(self.dilated, self.mix)):
            f, g = conv(F.pad(h, (2**i, 0))).chunk(2, 1)
            z = mix(torch.tanh(f) * torch.sigmoid(g))
            h, skip = h + z, skip + z
        return self.out(F.relu(skip))


torch.manual_seed(98)
t = torch.arange(40) / 4
wave = torch.stack([torch.sin(t), torch.sin(1.3 * t)])
mu = torch.sign(wave) * torch.log1p(15 * wave.abs()) / torch.log(torch.tensor(16.0))
ids = ((mu + 1) / 2 * 15).round().long()
model = WaveNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(5):
    loss = F.cross_entropy(model(ids[:, :-1]), ids[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
