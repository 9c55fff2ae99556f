"""A teacher is copied from the student again and again, and compared by KL and by features."""
import copy

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body, self.head = nn.Linear(6, width), nn.Linear(width, 3)

    def forward(self, x, return_features=False):
        f = torch.tanh(self.body(x))
        return (self.head(f), f) if return_features else self.head(f)


torch.manual_seed(0)
x, y = torch.randn(36, 6), torch.randint(0, 3, (36,))
student, teacher = Net(8), None
opt = torch.optim.SGD(student.parameters(), lr=0.3)
for generation in range(3):
    for rows in torch.randperm(36).split(10):
        out, features = student(x[rows], return_features=True)
        loss = F.cross_entropy(out, y[rows])
        kl = torch.zeros(())
        if teacher is not None:
            with torch.no_grad():
                soft, wanted = teacher(x[rows], return_features=True)
            kl = F.kl_div((out / 2).log_softmax(1), (soft / 2).softmax(1), reduction="batchmean") * 4
            loss = loss + kl + 0.1 * (1 - F.cosine_similarity(features, wanted).mean())
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"loss {loss.item():.6g} kl {kl.item():.6f}")
    teacher = copy.deepcopy(student).eval().requires_grad_(False)
    with torch.no_grad():
        print("accuracy", (teacher(x).argmax(1) == y).float().mean().item())
torch.save({"student": student, "teacher": teacher.state_dict()}["student"].state_dict(), "model.pt")
