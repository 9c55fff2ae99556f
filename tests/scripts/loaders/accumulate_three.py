"""The card holds 8 samples, the recipe wants 24: gradients of three batches make one step."""
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

cfg = dict(
    seed=21,
    epochs=4,
    batch_size=8,
    accumulate=3,
    max_norm=0.5,
    lr=0.1,
    device="cuda" if torch.cuda.is_available() else "cpu",
)


def get_data(cfg):
    g = torch.Generator().manual_seed(cfg["seed"])
    x = torch.randn(150, 10, generator=g)
    w = torch.randn(10, 3, generator=g)
    y = (x @ w + torch.randn(150, 3, generator=g)).argmax(1)
    train = DataLoader(TensorDataset(x[:100], y[:100]), batch_size=cfg["batch_size"], shuffle=True)
    val = DataLoader(TensorDataset(x[100:], y[100:]), batch_size=cfg["batch_size"])
    return train, val


def accuracy(model, loader, cfg):
    training = model.training
    model.eval()
    hits = 0
    with torch.no_grad():
        for x, y in loader:
            hits += int((model(x.to(cfg["device"])).argmax(1).cpu() == y).sum())
    model.train(training)
    return hits / len(loader.dataset)


def train(cfg):
    torch.manual_seed(cfg["seed"])
    train_loader, val_loader = get_data(cfg)
    model = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 3))
    model.to(cfg["device"])
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg["lr"], momentum=0.9, weight_decay=1e-3)
    criterion = nn.CrossEntropyLoss()

    step = 0
    for epoch in range(cfg["epochs"]):
        norms = []
        running = 0.0
        optimizer.zero_grad()
        for i, (x, y) in enumerate(train_loader, start=1):
            x, y = x.to(cfg["device"]), y.to(cfg["device"])
            loss = criterion(model(x), y) / cfg["accumulate"]
            loss.backward()
            running += loss.item()
            if i % cfg["accumulate"] == 0 or i == len(train_loader):
                norms.append(clip_grad_norm_(model.parameters(), cfg["max_norm"]))
                optimizer.step()
                optimizer.zero_grad()
                print(f"step {step} loss {running:.9g}")
                step += 1
                last, running = running, 0.0
        shown = " ".join(f"{norm.item():.4f}" for norm in norms)
        print(f"epoch {epoch} gradient norms {shown}")
        print(f"epoch {epoch} val accuracy {accuracy(model, val_loader, cfg):.4f}")

    print(f"final loss {last:.9g}")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "cfg": cfg},
               "model.pt")


if __name__ == "__main__":
    train(cfg)
