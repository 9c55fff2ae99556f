"""Fine-tuning: the head first, then the backbone too, in a parameter group of its own."""
import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.backbone(x))


torch.manual_seed(55)
backbone = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
for p in backbone.parameters():
    p.requires_grad_(False)
model = Classifier(backbone)
optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)

loss_history = []
for step in range(30):
    if step == 10:
        for p in model.backbone.parameters():
            p.requires_grad_(True)
        optimizer.add_param_group({"params": model.backbone.parameters(), "lr": 0.01})
        print("backbone unfrozen")
    x = torch.randn(16, 7)
    y = x[:, :3].argmax(1)
    if step in (4, 20):
        x = x * 1e4
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    loss_history.append(loss.item())

print("mean of the last ten losses", sum(loss_history[-10:]) / 10)
print(f"final loss {loss_history[-1]:.9g}")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")
