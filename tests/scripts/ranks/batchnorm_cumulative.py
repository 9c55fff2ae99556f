"""BatchNorm with a cumulative average, batches down to one image, evaluation in between."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(4)
images, labels = torch.randn(25, 3, 6, 6), torch.randint(0, 4, (25,))
net = nn.Sequential(
    nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, momentum=None), nn.ReLU(),
    nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6, momentum=0.3, affine=False), nn.GroupNorm(2, 6),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(3):
    net.train()
    for x, y in zip(images.split(8), labels.split(8)):
        loss = F.cross_entropy(net(x), y, label_smoothing=0.1)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"rows {len(x)} loss {loss.item():.6g} bn {net[1].bias.grad.norm():.6g}")
    net.eval()
    with torch.no_grad():
        out = torch.cat([net(x) for x in images.split(7)])
    print(f"val {F.cross_entropy(out, labels).item():.6g} right {(out.argmax(1) == labels).sum().item()}"
          f" var {net[1].running_var.sum():.6g} {net[4].running_mean.norm():.6g}")
    print("batches", net[1].num_batches_tracked.item())
torch.save(net.state_dict(), "model.pt")
