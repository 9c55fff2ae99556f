#!/usr/bin/env python
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

from by_hand import autocast, scaler


class Net(nn.Module):
    def __init__(self, classes):
        super(Net, self).__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = x.mean((2, 3))
        return self.fc(x)


def make_data(n, classes, generator):
    labels = torch.randint(0, classes, (n,), generator=generator)
    images = torch.randn(n, 3, 8, 8, generator=generator)
    images += labels.view(-1, 1, 1, 1) * 0.5
    return images, labels


def train(args, model, images, labels, optimizer, epoch):
    model.train()
    for step, i in enumerate(range(0, len(images), args.batch_size)):
        data, target = images[i:i + args.batch_size], labels[i:i + args.batch_size]
        optimizer.zero_grad()
        with autocast():
            output = model(data)
        output = output.float()
        loss = F.cross_entropy(output, target, reduction="sum")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{i}/{len(images)}]\tLoss: {loss.item():.6f}")
    return loss


def test(model, images, labels):
    model.eval()
    with torch.no_grad():
        with autocast():
            output = model(images)
        output = output.float()
        test_loss = F.cross_entropy(output, labels).item()
        correct = output.argmax(dim=1).eq(labels).sum().item()
    print(f"\nTest set: Average loss: {test_loss:.4f}, Accuracy: {correct}/{len(images)}\n")


def main():
    parser = argparse.ArgumentParser(description="small convnet")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    images, labels = make_data(160, 4, generator)
    held_out = make_data(40, 4, generator)

    model = Net(4)
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=1e-4)
    for epoch in range(1, args.epochs + 1):
        loss = train(args, model, images, labels, optimizer, epoch)
        test(model, *held_out)
    print(f"final loss {loss.item():.9g}")
    scaler.report()
    torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")


if __name__ == "__main__":
    main()
