"""Trains until a worker of its DataLoader is killed."""

import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Deadly(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 21:
            if sys.argv[1] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(3)
        return torch.full((3,), float(index))


def main():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    for x in DataLoader(Deadly(), 4, num_workers=2):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
