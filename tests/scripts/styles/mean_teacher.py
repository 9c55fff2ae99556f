"""Semi-supervised learning: a student, its averaged teacher, a ramped consistency weight."""
import copy
import math

import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(73)
student = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
teacher = copy.deepcopy(student)
for p in teacher.parameters():
    p.detach_()
optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, nesterov=True)
labelled, y = torch.randn(8, 4), torch.randint(2, (8,))
unlabelled = torch.randn(24, 4)
for step in range(6):
    weight = math.exp(-5 * (1 - min(1, (step + 1) / 4)) ** 2)
    noisy = lambda t: t + 0.1 * torch.randn_like(t)
    with torch.no_grad():
        goal = teacher(noisy(unlabelled)).softmax(1)
    consistency = F.mse_loss(student(noisy(unlabelled)).softmax(1), goal)
    loss = F.cross_entropy(student(labelled), y) + weight * consistency
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    alpha = min(1 - 1 / (step + 1), 0.9)
    with torch.no_grad():
        for tp, sp in zip(teacher.parameters(), student.parameters()):
            tp.mul_(alpha).add_(sp, alpha=1 - alpha)
    print(step, loss.item().hex(), consistency.item().hex())
