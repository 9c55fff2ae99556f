"""Calls models in workers of a loader, and trains one in a forked process."""
import multiprocessing

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
encoder = nn.Linear(4, 6)


class Encoded(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        with torch.no_grad():
            return encoder(torch.full((4,), index / 10.0)), index % 2


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(steps):
        x = torch.linspace(-1, 1, 32).reshape(8, 4)
        loss = nn.functional.mse_loss(model(x), x[:, :1].abs())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def in_a_child(model, queue):
    queue.put(train(model, 3))


net = nn.Linear(6, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.2)
for epoch in range(2):
    for x, y in DataLoader(Encoded(), 8, num_workers=2):
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, f"{loss.item():.6f}")
shared = nn.Linear(4, 1).share_memory()
context = multiprocessing.get_context("fork")
for _ in range(2):
    print("here", f"{train(shared, 3):.6f}")
    queue = context.Queue()
    child = context.Process(target=in_a_child, args=(shared, queue))
    child.start()
    print("there", f"{queue.get():.6f}")
    child.join()
print(f"{shared.weight.norm():.6f} {net.weight.norm():.6f}")
torch.save([shared.state_dict(), net.state_dict()], "model.pt")
