"""Distil a frozen teacher into a student, and keep an exponential average of the student."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from by_hand import autocast, scaler


def make_net(width):
    return nn.Sequential(
        nn.Linear(12, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width), nn.GELU(),
        nn.Linear(width, 5),
    )


class EMA:
    def __init__(self, model, decay):
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for ours, theirs in zip(self.module.parameters(), model.parameters()):
            ours.mul_(self.decay).add_(theirs, alpha=1 - self.decay)


def distill_loss(student_logits, teacher_logits, labels, T=4.0, alpha=0.7):
    soft = F.kl_div(
        F.log_softmax(student_logits / T, dim=1), F.softmax(teacher_logits / T, dim=1),
        reduction="batchmean",
    )
    return alpha * T * T * soft + (1 - alpha) * F.cross_entropy(student_logits, labels)


if __name__ == "__main__":
    torch.manual_seed(0)
    teacher = make_net(48).eval()
    for p in teacher.parameters():
        p.requires_grad = False
    student = make_net(16)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.02, momentum=0.9)
    ema = EMA(student, 0.9)
    held_out = torch.randn(64, 12)
    for step in range(1, 25):
        x = torch.randn(16, 12)
        if step == 5:
            x *= 3000
        labels = torch.randint(0, 5, (16,))
        with torch.no_grad(), autocast():
            teacher_logits = teacher(x)
        with autocast():
            student_logits = student(x)
        loss = distill_loss(student_logits.float(), teacher_logits.float(), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(student.parameters(), 2.0)
        scaler.step(optimizer)
        scaler.update()
        ema.update(student)
        if step % 8 == 0:
            with torch.no_grad(), autocast():
                agree = (ema.module(held_out).argmax(1) == teacher(held_out).argmax(1)).float()
            print(f"step {step} loss {loss.item():.5f} ema agrees {agree.mean().item():.3f}")
    print(f"final loss {loss.item():.9g}")
    scaler.report()
    torch.save({"student": student.state_dict(), "ema": ema.module.state_dict(),
                "optimizer": optimizer.state_dict()}, "model.pt")
