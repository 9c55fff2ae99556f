"""A model for which there is no room beside the script's own graph, as on a GPU that is nearly full.

Where torch would run out of memory, this model raises what torch raises then. With "counts" it
counts outside of itself how often it has seen a part of the batch.
"""

import sys

import torch
from torch import nn


def is_tried():
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith("data_parallel/split/trial.py"):
            return frame.f_code.co_name != "make_whole_call"
        frame = frame.f_back
    return False


COUNTS = {"parts": 0}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        h = self.layer(x).relu()
        if is_tried() and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            raise torch.OutOfMemoryError("out of memory.")
        if "counts" in sys.argv and len(x) < 8:
            COUNTS["parts"] += 1
        return h


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.randn(8, 4)
for _ in range(6):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
print(COUNTS["parts"])
