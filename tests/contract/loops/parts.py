"""An encoder and a decoder called one by one, a loss with parameters, a model made late."""

import torch
from torch import nn

call = globals().get("call", lambda module, *args: module(*args))
fused = globals().get("fused")


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 8))


class Centers(nn.Module):
    def __init__(self):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(2, 3))

    def forward(self, codes, labels):
        return (codes - self.centers[labels]).square().mean()


torch.manual_seed(0)
model, centers = AutoEncoder(), Centers()
parameters = [*model.parameters(), *centers.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=fused)
head = None
losses = []
for step in range(20):
    x, labels = torch.randn(16, 8), torch.randint(0, 2, (16,))
    codes = call(model.encoder, x)
    loss = (call(model.decoder, codes) - x).square().mean() + call(centers, codes, labels)
    if step == 3:
        head = nn.Linear(3, 2)
        optimizer.add_param_group({"params": head.parameters()})
    if head is not None:
        loss = loss + nn.functional.cross_entropy(call(head, codes), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

result = {**model.state_dict(), **centers.state_dict(), "head": head.weight.detach()}
