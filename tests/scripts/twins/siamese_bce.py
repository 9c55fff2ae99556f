import torch
import torch.nn as nn

from by_hand import autocast, scaler


class SiameseNetwork(nn.Module):
    """Chance that two images show the same thing."""

    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 16))
        self.fc = nn.Linear(32, 1)
        self.sigmoid = nn.Sigmoid()

    def forward_once(self, x):
        return self.cnn(x)

    def forward(self, input1, input2):
        output = torch.cat((self.forward_once(input1), self.forward_once(input2)), 1)
        return self.sigmoid(self.fc(output))


def pairs(steps, generator):
    prototypes = torch.randn(5, 1, 6, 6, generator=generator)
    for _ in range(steps):
        a, b = torch.randint(0, 5, (2, 16), generator=generator)
        same = torch.rand(16, generator=generator) < 0.5
        b = torch.where(same, a, b)
        noise = 0.1 * torch.randn(2, 16, 1, 6, 6, generator=generator)
        yield prototypes[a] + noise[0], prototypes[b] + noise[1], (a == b).float().unsqueeze(1)


torch.manual_seed(3)
model = SiameseNetwork()
criterion = nn.BCELoss(reduction="sum")
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)

for step, (left, right, target) in enumerate(pairs(30, torch.Generator().manual_seed(5))):
    optimizer.zero_grad()
    with autocast():
        outputs = model(left, right)
    outputs = outputs.float()
    loss = criterion(outputs, target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    if step % 10 == 9:
        accuracy = (outputs.round() == target).float().mean().item()
        print(f"step {step} loss {loss.item():.6f} accuracy {accuracy:.3f}")

print(f"final loss {loss.item():.9g}")
scaler.report()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")
