"""A module that knows how to train itself, and a trainer that knows nothing of models."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from by_hand import autocast, scaler


class LitRegressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        return {"loss": loss, "log": {"train_loss": loss.detach()}}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.l1_loss(self(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=30)
        return [optimizer], [scheduler]


class Trainer:
    def __init__(self, max_epochs):
        self.max_epochs = max_epochs

    def fit(self, module, train_loader, val_loader):
        (optimizer,), (scheduler,) = module.configure_optimizers()
        for epoch in range(self.max_epochs):
            module.train()
            for batch_idx, batch in enumerate(train_loader):
                with autocast():
                    out = module.training_step(batch, batch_idx)
                out["loss"] = out["loss"].float()
                optimizer.zero_grad()
                scaler.scale(out["loss"]).backward()
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
            module.eval()
            with torch.no_grad():
                scores = []
                for i, b in enumerate(val_loader):
                    with autocast():
                        score = module.validation_step(b, i)
                    scores.append(score.float())
            print(f"epoch={epoch} train_loss={out['log']['train_loss']:.6f} "
                  f"val_l1={torch.stack(scores).mean():.6f}")
        print(f"final loss {out['loss'].item():.9g}")
        scaler.report()
        torch.save({"module": module.state_dict(), "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict()}, "model.pt")


def dataset(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=g)
    y = torch.stack([x.sum(1).sin(), x.prod(1)], 1)
    y[n // 2] = 50.0  # a wrong label
    return TensorDataset(x, y)


torch.manual_seed(2024)
Trainer(max_epochs=3).fit(
    LitRegressor(),
    DataLoader(dataset(160, 0), batch_size=16, shuffle=True),
    DataLoader(dataset(32, 1), batch_size=16),
)
