"""Training loops for step_overhead.py: models, one step, and a worker that steps on demand.

Run as a script, it is the loop as most people write it, in fp32 and uncompiled:

    python loops.py VARIANT BATCH SOCKET
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

CLASSES = 10
Data = tuple[nn.Module, Tensor]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Refine x (batch, seq, width)."""
        batch, seq, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Classifier(nn.Module):
    """A body, the mean over the given dimensions, and a linear head."""

    def __init__(self, body: nn.Module, width: int, mean_over: tuple[int, ...]) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, CLASSES)
        self.mean_over = mean_over

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (batch, classes)."""
        return self.head(self.body(x).mean(dim=self.mean_over))


def mlp(batch: int) -> Data:
    """Return two layers and their input: few modules, large products."""
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES))
    return model, torch.randn(batch, 1024)


def transformer(batch: int) -> Data:
    """Return twelve blocks of width 64 and their input: many modules, small products."""
    body = nn.Sequential(*(Block(64, heads=4) for _ in range(12)))
    return Classifier(body, 64, (1,)), torch.randn(batch, 64, 64)


def convnet(batch: int) -> Data:
    """Return fifty convolutions with batch norm and their input."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(49):
        layers += [nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1, bias=False)]
    return Classifier(nn.Sequential(*layers), 16, (2, 3)), torch.randn(batch, 3, 16, 16)


def empty(batch: int) -> Data:
    """Return one small layer and its input, to show what a step costs without arithmetic."""
    return nn.Linear(8, CLASSES), torch.randn(batch, 8)


VARIANTS: dict[str, Callable[[int], Data]] = {
    "mlp": mlp,
    "transformer": transformer,
    "convnet": convnet,
    "empty": empty,
}


def build(variant: str, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Return the model, its inputs and targets, the same in every process.

    Every process computes in one thread, on the same core: the compared loops take turns, and other
    load of the machine must affect both alike.
    """
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.manual_seed(0)
    model, inputs = VARIANTS[variant](batch)
    return model, inputs, torch.randint(CLASSES, (len(inputs),))


def train_step(
    forward: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
) -> Tensor:
    """Take one optimizer step and return its loss."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(forward(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss


def take_steps(step: Callable[[], Tensor], count: int) -> dict[str, object]:
    """Take steps, and return wall and processor time of each, in seconds, and the last loss."""
    wall_s, cpu_s = [], []
    for _ in range(count):
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step()
        cpu_s.append(time.process_time() - cpu)
        wall_s.append(time.perf_counter() - wall)
    return {"wall_s": wall_s, "cpu_s": cpu_s, "loss": loss.item()}


def answer(address: str, block: Callable[[int], dict[str, object]]) -> None:
    """Read numbers of steps from a Unix socket, and answer each with the result of a block."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rw", encoding="utf-8") as stream:
            for line in stream:
                print(json.dumps(block(int(line))), file=stream, flush=True)


def serve(address: str, step: Callable[[], Tensor]) -> None:
    """Read numbers of steps from a Unix socket, and answer each with their times and loss."""
    answer(address, lambda count: take_steps(step, count))


def main() -> None:
    """Build the loop named on the command line and serve it."""
    variant, batch, address = sys.argv[1:]
    model, inputs, targets = build(variant, int(batch))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    serve(address, lambda: train_step(model, optimizer, inputs, targets))


if __name__ == "__main__":
    main()
