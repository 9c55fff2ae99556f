"""Trains, saves, throws everything away, builds it anew, resumes and goes on."""
import torch
from torch import nn


def build():
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    return model, optimizer, scheduler


def save(path, step, model, optimizer, scheduler):
    torch.save(
        {
            "step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(), "rng": torch.get_rng_state(),
        },
        path,
    )


def resume(path):
    checkpoint = torch.load(path)
    parts = build()
    for name, part in zip(("model", "optimizer", "scheduler"), parts):
        part.load_state_dict(checkpoint[name])
    torch.set_rng_state(checkpoint["rng"])
    return checkpoint["step"], *parts


def train(first, last, model, optimizer, scheduler):
    for step in range(first, last):
        x = torch.randn(16, 8)
        y = x[:, :3].argmin(1)
        if step in (6, 21):
            x = x * 1e4
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    print(f"after step {last}: loss {loss.item():.6f}")
    return loss


torch.manual_seed(66)
parts = build()
train(0, 15, *parts)
save("checkpoint.pt", 15, *parts)
del parts

step, *parts = resume("checkpoint.pt")
loss = train(step, 30, *parts)
print(f"final loss {loss.item():.9g}")
save("model.pt", 30, *parts)
