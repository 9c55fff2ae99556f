"""Multi-task gradients, projected onto each other's normal plane where they conflict."""
import torch
from torch import nn

torch.manual_seed(88)
shared = nn.Sequential(nn.Linear(5, 12), nn.ReLU())
heads = [nn.Linear(12, 1) for _ in range(3)]
params = list(shared.parameters())
optimizer = torch.optim.Adam(params + [p for h in heads for p in h.parameters()], lr=1e-2)
x = torch.randn(16, 5)
targets = [x.sum(1, keepdim=True), -x[:, :1], x.norm(dim=1, keepdim=True)]
for step in range(5):
    optimizer.zero_grad()
    h = shared(x)
    grads, losses = [], []
    for i, (head, target) in enumerate(zip(heads, targets)):
        loss = nn.functional.mse_loss(head(h), target)
        loss.backward(retain_graph=i < 2)
        grads.append(torch.cat([p.grad.flatten().clone() for p in params]))
        for p in params:
            p.grad = None
        losses.append(loss.item())
    merged = torch.zeros_like(grads[0])
    for i, g in enumerate(grads):
        g = g.clone()
        for j, other in enumerate(grads):
            if i != j and (dot := g @ other) < 0:
                g -= dot / other.square().sum() * other
        merged += g
    at = 0
    for p in params:
        p.grad = merged[at:at + p.numel()].view_as(p).clone()
        at += p.numel()
    optimizer.step()
    print(step, *(v.hex() for v in losses))
