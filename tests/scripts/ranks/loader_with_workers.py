"""A DataLoader with two workers, augmentation by the worker's seed, a sampler of weights."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler


class Noisy(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(34, 4, generator=g), torch.randint(0, 2, (34,), generator=g)

    def __len__(self):
        return 34

    def __getitem__(self, i):
        return {"x": self.x[i] + 0.1 * torch.randn(4), "y": self.y[i], "id": i}


def main():
    torch.manual_seed(197)
    data = Noisy()
    sampler = WeightedRandomSampler([1.0 + y for y in data.y.tolist()], 34)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=2, persistent_workers=True)
    net = nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    for epoch in range(2):
        for batch in loader:
            loss = F.cross_entropy(net(batch["x"]), batch["y"])
            opt.zero_grad()
            loss.backward()
            opt.step()
            print(f"loss {loss.item():.6g} ids {batch['id'].tolist()}")
    torch.save(net.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
