"""A siamese network with triplet loss, and hard negatives mined in the batch."""
import torch
from torch import nn

torch.manual_seed(39)
centers = torch.randn(4, 5)
labels = torch.arange(4).repeat(5)
points = centers[labels] + 0.3 * torch.randn(20, 5)
embed = nn.Sequential(nn.Linear(5, 16), nn.PReLU(), nn.Linear(16, 3))
optimizer = torch.optim.Adamax(embed.parameters(), lr=1e-2)
triplet = nn.TripletMarginLoss(margin=0.5)
for step in range(6):
    with torch.no_grad():
        d = torch.cdist(embed(points), embed(points))
    same = labels[:, None] == labels[None]
    hard_neg = d.masked_fill(same, float("inf")).argmin(1)
    hard_pos = d.masked_fill(~same, -1).argmax(1)
    a, p, n = embed(points), embed(points[hard_pos]), embed(points[hard_neg])
    loss = triplet(a, p, n)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
