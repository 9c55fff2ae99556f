"""Adversarial training: PGD attacks in an inner loop, model in eval mode meanwhile."""
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(84)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x, y = torch.randn(20, 6), torch.randint(3, (20,))


def attack(x, y, eps=0.2, alpha=0.1, steps=3):
    was_training = model.training
    model.eval()
    delta = torch.empty_like(x).uniform_(-eps, eps).requires_grad_()
    for _ in range(steps):
        loss = F.cross_entropy(model(x + delta), y)
        loss.backward()
        delta.data = (delta.data + alpha * delta.grad.sign()).clamp(-eps, eps)
        delta.grad.zero_()
    model.train(was_training)
    model.zero_grad()
    return (x + delta).detach()


for step in range(5):
    adv = attack(x, y)
    loss = 0.5 * (F.cross_entropy(model(x), y) + F.cross_entropy(model(adv), y))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
