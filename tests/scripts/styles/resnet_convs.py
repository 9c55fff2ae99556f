"""A residual convnet with zero-initialized last gains, weight decay groups and label smoothing."""
import torch
from torch import nn


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, n_in, n_out, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(n_out), nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.shortcut = nn.Identity() if stride == 1 and n_in == n_out else nn.Conv2d(n_in, n_out, 1, stride, bias=False)

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


torch.manual_seed(82)
net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), BasicBlock(8, 8), BasicBlock(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
for m in net.modules():
    if isinstance(m, BasicBlock):
        nn.init.zeros_(m.bn2.weight)
    elif isinstance(m, nn.Conv2d):
        nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
net = net.to(memory_format=torch.channels_last)
groups = {True: [], False: []}
for p in net.parameters():
    groups[p.dim() > 1].append(p)
optimizer = torch.optim.SGD([{"params": groups[True], "weight_decay": 5e-4}, {"params": groups[False]}], lr=0.05, momentum=0.9)
for step in range(4):
    x, y = torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last), torch.randint(4, (4,))
    loss = nn.functional.cross_entropy(net(x), y, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
net.eval()
print(net(x).double().sum().item().hex())
