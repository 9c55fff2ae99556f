"""Regression with command-line options and a main()."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--hidden", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--momentum", type=float, default=0.9)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(1)
    x = torch.linspace(-2, 2, 40)[:, None]
    y = torch.sin(2 * x)
    net = nn.Sequential(nn.Linear(1, args.hidden), nn.Tanh(), nn.Linear(args.hidden, 1))
    opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=args.momentum, nesterov=True)
    for epoch in range(args.epochs):
        opt.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        opt.step()
        print(f"epoch {epoch} loss {loss.item().hex()}")
    print("norm", nn.utils.parameters_to_vector(net.parameters()).double().norm().item().hex())


if __name__ == "__main__":
    main()
