"""A trainer that leaves out a batch whose gradients are not finite, and counts it."""
import torch
from torch import nn

from by_hand import autocast, scaler


class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.left_out = 0

    def train_on(self, x, y):
        with autocast():
            rates = self.model(x)
        loss = nn.functional.poisson_nll_loss(rates.float(), y, reduction="sum")
        self.optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)
        if not torch.isfinite(norm):
            self.left_out += 1
            scaler.skipped += 1
            scaler.update()  # a batch that is left out lowers the scale as well
            return loss.item()
        scaler.step(self.optimizer)
        scaler.update()
        return loss.item()

    def save(self, path):
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()},
                   path)


torch.manual_seed(29)
trainer = Trainer(nn.Sequential(nn.Linear(6, 20), nn.CELU(), nn.Linear(20, 1)), lr=5e-3)
for step in range(28):
    x = torch.randn(32, 6)
    y = torch.poisson((1.0 + x[:, :1]).exp())
    loss = trainer.train_on(x, y)
    if step % 9 == 0:
        print(f"step {step} loss {loss:.5f}")

print(f"final loss {loss:.9g}")
scaler.report()
trainer.save("model.pt")
