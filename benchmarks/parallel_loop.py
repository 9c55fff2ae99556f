"""A loop that knows nothing about ranks, for data_parallel_overhead.py.

    python parallel_loop.py TASK train|evaluate FILE

It never ends. For each step it writes a line with the time of its end, in seconds of the system's
monotonic clock, and the processor time of its process until then. Every ten steps it writes another
one: the word loss, and the loss or the number of correct samples.
"""

import itertools
import sys
import time
from typing import Any, TextIO

import torch
from parallel_tasks import Task, build_task
from torch.utils.data import DataLoader, TensorDataset

READ_EVERY = 10  # steps


def train(task: Task, loader: DataLoader[Any], file: TextIO) -> None:
    """Train without end."""
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-4)
    steps = itertools.count(1)
    while True:
        for x, y in loader:
            loss = task.loss(task.model, x, y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if next(steps) % READ_EVERY == 0:
                print("loss", loss.item(), file=file, flush=True)
            print(time.monotonic(), time.process_time(), file=file)


def evaluate(task: Task, loader: DataLoader[Any], file: TextIO) -> None:
    """Count correct samples without end."""
    task.model.eval()
    steps, right = itertools.count(1), 0
    while True:
        for x, y in loader:
            with torch.no_grad():
                right += (task.model(x).argmax(dim=-1) == y.flatten()).sum().item()
            if next(steps) % READ_EVERY == 0:
                print("loss", right, file=file, flush=True)
            print(time.monotonic(), time.process_time(), file=file)


def main() -> None:
    """Run the task of the command line."""
    name, mode, path = sys.argv[1:]
    task = build_task(name)
    loader = DataLoader(TensorDataset(task.inputs, task.targets), task.batch, shuffle=True)
    with open(path, "w") as file:  # noqa: PTH123
        {"train": train, "evaluate": evaluate}[mode](task, loader, file)


if __name__ == "__main__":
    main()
