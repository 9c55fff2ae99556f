"""Trains two steps, then fails twice inside the model's forward."""

import torch


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).reshape(3, -1)


def step(net: Net, optimizer: torch.optim.Optimizer, size: int) -> float:
    optimizer.zero_grad()
    loss = net(torch.randn(size, 4)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def main() -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    errors = []
    for size in (3, 6, 2, 1):
        try:
            print(size, step(net, optimizer, size))  # noqa: T201
        except RuntimeError as error:
            errors.append(error)
    raise ExceptionGroup("a step failed", errors[:1]) from errors[1]


main()
