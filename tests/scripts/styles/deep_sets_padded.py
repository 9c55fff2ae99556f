"""Sets of changing size, padded and masked in a collate function."""
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset


class Sets(Dataset):
    def __init__(self, n):
        gen = torch.Generator().manual_seed(79)
        sizes = torch.randint(2, 7, (n,), generator=gen).tolist()
        self.items = [torch.randn(s, 3, generator=gen) for s in sizes]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i], self.items[i].max()


def collate(batch):
    sets, targets = zip(*batch)
    mask = pad_sequence([torch.ones(len(s)) for s in sets], batch_first=True)
    return pad_sequence(sets, batch_first=True), mask, torch.stack(targets)


class DeepSets(nn.Module):
    def __init__(self):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 16))
        self.rho = nn.Linear(16, 1)

    def forward(self, x, mask):
        h = self.phi(x).masked_fill(mask[..., None] == 0, -1e4)
        return self.rho(h.max(1).values).squeeze(1)


torch.manual_seed(79)
model = DeepSets()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    for x, mask, y in DataLoader(Sets(20), batch_size=6, shuffle=True, collate_fn=collate):
        loss = nn.functional.mse_loss(model(x, mask), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(epoch, x.shape[1], loss.item().hex())
