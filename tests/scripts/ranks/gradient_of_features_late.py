"""Gradients of a loss w.r.t. features that the model returns, asked for after some steps."""
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        features = torch.tanh(self.body(x))
        return features, self.head(features)


torch.manual_seed(5)
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    features, logits = model(x)
    loss = F.cross_entropy(logits, y)
    if step == 6:
        (g,) = torch.autograd.grad(loss, features, retain_graph=True)
        print(f"g {g.norm():.6g}")
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"loss {loss.item():.6g}")
torch.save(model.state_dict(), "model.pt")
