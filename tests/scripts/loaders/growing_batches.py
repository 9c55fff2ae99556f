"""Small batches first, larger ones later; stops when the validation loss has had enough."""
import copy

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZES = [8, 12, 16, 24, 32, 48]
PATIENCE = 3


class EarlyStopping:
    def __init__(self, patience):
        self.patience = patience
        self.best = float("inf")
        self.bad_epochs = 0
        self.state = None

    def __call__(self, value, model):
        if value < self.best:
            self.best, self.bad_epochs = value, 0
            self.state = copy.deepcopy(model.state_dict())
        else:
            self.bad_epochs += 1
        return self.bad_epochs >= self.patience


def datasets():
    g = torch.Generator().manual_seed(16)
    x = torch.randn(147, 5, generator=g)
    y = torch.sin(x[:, :1]) * x[:, 1:2] + 0.3 * torch.randn(147, 1, generator=g)
    return TensorDataset(x[:75], y[:75]), TensorDataset(x[75:], y[75:])


def validation_loss(model, loader, loss_fn, device):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            total += loss_fn(model(x), y).item() * len(x)
    model.train()
    return total / len(loader.dataset)


def main():
    torch.manual_seed(16)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, val_set = datasets()
    val_loader = DataLoader(val_set, batch_size=25)
    model = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=1)
    early_stopping = EarlyStopping(PATIENCE)
    loss_fn = nn.MSELoss()

    step = 0
    for epoch in range(20):
        batch_size = BATCH_SIZES[min(epoch, len(BATCH_SIZES) - 1)]
        train_loader = DataLoader(train_set, batch_size=batch_size, shuffle=True)
        losses = []
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            step += 1
            print(f"step {step} loss {loss.item():.9g}")
        val_loss = validation_loss(model, val_loader, loss_fn, device)
        scheduler.step(val_loss)
        mean = torch.stack(losses).mean().item()
        print(f"epoch {epoch} batch size {batch_size} train {mean:.9g} "
              f"val {val_loss:.6f} lr {optimizer.param_groups[0]['lr']:.4g}")
        if early_stopping(val_loss, model):
            print(f"stopped after epoch {epoch}")
            break

    model.load_state_dict(early_stopping.state)
    print(f"best val {validation_loss(model, val_loader, loss_fn, device):.6f}")
    print(f"final loss {loss.item():.9g}")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict()}, "model.pt")


if __name__ == "__main__":
    main()
