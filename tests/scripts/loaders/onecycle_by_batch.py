# Denoise short signals. The rate goes up and down once over all batches of the run.
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(60)
device = 'cuda' if torch.cuda.is_available() else 'cpu'
epochs = 3

def signals(n):
    t = torch.linspace(0, 1, 16)
    a, f, p = torch.rand(3, n, 1)
    clean = (0.5 + a) * torch.sin(6.28 * ((1 + 2 * f) * t + p))
    return clean + 0.3 * torch.randn(n, 16), clean

noisy, clean = signals(100)
noisy_test, clean_test = signals(33)
loader = DataLoader(TensorDataset(noisy, clean), batch_size=12, shuffle=True)
test_loader = DataLoader(TensorDataset(noisy_test, clean_test), batch_size=12)

class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Conv1d(1, 8, 5, padding=2)
        self.mid = nn.Conv1d(8, 8, 5, padding=2)
        self.out = nn.Conv1d(8, 1, 5, padding=2)
    def forward(self, x):
        h = torch.tanh(self.inp(x.unsqueeze(1)))
        h = h + torch.tanh(self.mid(h))
        return self.out(h).squeeze(1)

model = Denoiser().to(device)
opt = torch.optim.SGD(model.parameters(), lr=2e-3, momentum=0.9)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=2e-3, total_steps=epochs * len(loader))

for epoch in range(epochs):
    model.train()
    for i, (x, y) in enumerate(loader):
        x, y = x.to(device), y.to(device)
        pred = model(x)
        # summed over the signal, mean over the batch
        loss = F.mse_loss(pred, y, reduction="none").sum() / x.size(0)
        print(f"step {epoch * len(loader) + i} loss {loss:.9g}")
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()

    model.eval()
    with torch.no_grad():
        sq = sum((model(x.to(device)) - y.to(device)).pow(2).sum().item() for x, y in test_loader)
    print(f'epoch {epoch} test mse {sq / clean_test.numel():.6f} lr {sched.get_last_lr()[0]:.6g}')

print(f"final loss {loss:.9g}")
torch.save({'model': model.state_dict(), 'opt': opt.state_dict(),
            'sched': sched.state_dict()}, 'model.pt')
