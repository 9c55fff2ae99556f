"""Small pictures of bars, made by two worker processes that live as long as the loader."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Bars(Dataset):
    """A bright bar on noise: across, upright, or from corner to corner."""

    def __init__(self, n, first_seed=0):
        self.n = n
        self.first_seed = first_seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.first_seed + i)
        image = 0.4 * torch.randn(1, 8, 8, generator=g)
        where = int(torch.randint(1, 7, (1,), generator=g))
        kind = i % 3
        if kind == 0:
            image[0, where] += 1
        elif kind == 1:
            image[0, :, where] += 1
        else:
            image[0] += torch.eye(8)
        return image, kind


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 12, 3, stride=2, padding=1)
        self.fc = nn.Linear(12 * 16, 3)

    def forward(self, x):
        x = F.gelu(self.conv1(x))
        x = F.gelu(self.conv2(x))
        return self.fc(x.flatten(1))


class Trainer:
    def __init__(self, model, optimizer, train_loader, val_loader, device):
        self.model = model.to(device)
        self.optimizer = optimizer
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.device = device
        self.global_step = 0

    def fit(self, epochs):
        for epoch in range(epochs):
            self.train_epoch()
            print(f"epoch {epoch} val_acc {self.evaluate():.4f}")
        self.save("model.pt")

    def train_epoch(self):
        self.model.train()
        for images, kinds in self.train_loader:
            images = images.to(self.device, non_blocking=True)
            kinds = kinds.to(self.device, non_blocking=True)
            self.loss = F.cross_entropy(self.model(images), kinds)
            self.global_step += 1
            print(f"step {self.global_step} loss {self.loss.item():.9g}")
            self.optimizer.zero_grad()
            self.loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        hits = []
        for images, kinds in self.val_loader:
            logits = self.model(images.to(self.device))
            hits.append(logits.argmax(1).cpu() == kinds)
        return torch.cat(hits).double().mean().item()

    def save(self, path):
        checkpoint = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "global_step": self.global_step,
        }
        torch.save(checkpoint, path)


def main():
    torch.manual_seed(12)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    pin = device.type == "cuda"
    train_loader = DataLoader(
        Bars(100), batch_size=16, shuffle=True, drop_last=True, num_workers=2,
        persistent_workers=True, pin_memory=pin,
    )
    val_loader = DataLoader(Bars(45, first_seed=1000), batch_size=20)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8, nesterov=True)
    trainer = Trainer(model, optimizer, train_loader, val_loader, device)
    trainer.fit(epochs=4)
    print(f"final loss {trainer.loss.item():.9g}")


if __name__ == "__main__":
    main()
