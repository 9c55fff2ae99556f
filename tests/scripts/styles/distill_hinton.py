"""A teacher is trained first, then a student on softened logits."""
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(34)
x, y = torch.randn(40, 6), torch.randint(4, (40,))
teacher = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4))
student = nn.Linear(6, 4)


def fit(model, loss_fn, lr, steps):
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for _ in range(steps):
        opt.zero_grad()
        loss = loss_fn(model(x))
        loss.backward()
        opt.step()
        print(loss.item().hex())


fit(teacher, lambda logits: F.cross_entropy(logits, y), 0.2, 5)
teacher.eval().requires_grad_(False)
T = 3.0


def distill(logits):
    soft = F.kl_div(F.log_softmax(logits / T, 1), F.log_softmax(teacher(x) / T, 1), reduction="batchmean", log_target=True)
    return 0.7 * T * T * soft + 0.3 * F.cross_entropy(logits, y)


fit(student, distill, 0.1, 5)
