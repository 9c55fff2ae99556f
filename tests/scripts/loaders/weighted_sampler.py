# %% [markdown]
# # Rare events
# Nine in ten of the samples are harmless. Draw the rare ones as often as the others.

# %%
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

SEED = 1
torch.manual_seed(SEED)
dev = "cuda" if torch.cuda.is_available() else "cpu"


# %%
def make(n):
    X = torch.randn(n, 6)
    score = X[:, 0] * X[:, 1] + X[:, 2] + 0.3 * torch.randn(n)
    return X, (score > 1.5).long()


X_train, y_train = make(300)
X_val, y_val = make(150)
counts = torch.bincount(y_train)
print("samples per class", counts.tolist())

# %%
sampler = WeightedRandomSampler(
    weights=1.0 / counts[y_train].double(),
    num_samples=140,
    replacement=True,
    generator=torch.Generator().manual_seed(SEED),
)
train_dl = DataLoader(TensorDataset(X_train, y_train), batch_size=20, sampler=sampler)
val_dl = DataLoader(TensorDataset(X_val, y_val), batch_size=64)

# %%
net = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 2))
net = net.to(dev)
opt = torch.optim.AdamW(net.parameters(), lr=8e-3, weight_decay=0.1)
ce = nn.CrossEntropyLoss()


def validate():
    """Loss on the samples as they are, and the mean of the recalls of both classes."""
    net.eval()
    nll = 0.0
    hit = torch.zeros(2)
    with torch.no_grad():
        for xb, yb in val_dl:
            logits = net(xb.to(dev)).cpu()
            nll -= logits.log_softmax(1).gather(1, yb[:, None]).sum().item()
            right = logits.argmax(1) == yb
            hit += torch.stack([right[yb == c].sum() for c in (0, 1)])
    recall = hit / torch.bincount(y_val)
    return nll / len(y_val), recall.mean().item()


# %%
step, best = 0, float("inf")
for epoch in range(5):
    net.train()
    for xb, yb in train_dl:
        xb, yb = xb.to(dev), yb.to(dev)
        loss = ce(net(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.9g}")
        step += 1
    val_loss, balanced = validate()
    print(f"epoch {epoch} val loss {val_loss:.6f} balanced accuracy {balanced:.4f}")
    if val_loss < best:
        best = val_loss
        torch.save({"epoch": epoch, "val_loss": val_loss, "net": net.state_dict(),
                    "opt": opt.state_dict()}, "model.pt")
        print("saved")

# %%
checkpoint = torch.load("model.pt", map_location=dev)
net.load_state_dict(checkpoint["net"])
val_loss, balanced = validate()
print(f"best epoch {checkpoint['epoch']} val loss {val_loss:.6f} balanced accuracy {balanced:.4f}")
print(f"final loss {loss.item():.9g}")
