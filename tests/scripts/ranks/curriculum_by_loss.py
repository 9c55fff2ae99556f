"""Each epoch trains on the share of the data that the model finds easiest, in that order."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(21)
X = torch.randn(50, 6)
Y = (X @ torch.randn(6)).sign().add(1).div(2).long()
Y[::7] = 1 - Y[::7]
model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.2)


@torch.no_grad()
def difficulty():
    model.eval()
    losses = F.cross_entropy(model(X), Y, reduction="none")
    model.train()
    return losses


for epoch, share in enumerate([0.3, 0.5, 0.83, 1.0]):
    hard = difficulty()
    order = hard.argsort()[: int(share * len(X))]
    flipped = sum(1 for i in order.tolist() if i % 7 == 0)
    for rows in order.split(9):
        losses = F.cross_entropy(model(X[rows]), Y[rows], reduction="none")
        weights = torch.softmax(-losses.detach(), 0)
        opt.zero_grad()
        (weights * losses).sum().backward()
        opt.step()
    print(f"epoch {epoch} n {len(order)} flipped {flipped} hardest {hard[order[-1]]:.6g} "
          f"last {losses.mean().item():.6g}")
torch.save(model.state_dict(), "model.pt")
