# ruff: noqa: T201
"""One file that holds the model's class, too: pickles name it __main__.Net.

python single_file.py save PATH
python single_file.py load PATH
"""

import sys

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x):
        return self.body(x)


def save(path):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(3, 6)).square().mean().backward()
        optimizer.step()
    torch.save({"model": model, "optimizer": optimizer, "weights": model.state_dict()}, path)


def load(path):
    saved = torch.load(path, weights_only=False)
    model, optimizer, x = saved["model"], saved["optimizer"], torch.ones(3, 6)
    reference = Net()
    reference.load_state_dict(saved["weights"])
    assert type(model) is Net
    assert torch.equal(model(x), reference(x))
    model(x).square().mean().backward()
    optimizer.step()
    steps = {state["step"].item() for state in optimizer.state.values()}
    groups = optimizer.param_groups
    print(type(optimizer).__name__, groups[0]["fused"], groups[0]["foreach"], steps)
    print([name for name in sys.modules if name.startswith("fasttrain")])


if __name__ == "__main__":
    {"save": save, "load": load}[sys.argv[1]](sys.argv[2])
