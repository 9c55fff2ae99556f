"""The training loop for gpu_speed.py as most people write it: fp32, uncompiled, unfused.

python loops_gpu.py MODEL DEVICE full|tiny BATCH SOCKET
"""

import sys
import time
from collections.abc import Callable

import torch
from loops import answer
from models import build
from torch import Tensor, nn


def wait_for(device: str) -> None:
    """Wait until the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def name_of(device: str) -> str:
    """Return the name of the device."""
    return torch.cuda.get_device_name() if device == "cuda" else device


def take_block(step: Callable[[], Tensor], device: str, count: int) -> dict[str, object]:
    """Take steps, and return seconds per step, peak memory in bytes, and the last loss."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    wait_for(device)
    start_s = time.perf_counter()
    for _ in range(count):
        loss = step()
    wait_for(device)
    step_s = (time.perf_counter() - start_s) / count
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {"step_s": step_s, "peak_bytes": peak, "loss": loss.item(), "device": name_of(device)}


def main() -> None:
    """Build the loop named on the command line and serve it."""
    name, device, size, batch, address = sys.argv[1:]
    model, inputs, targets = build(name, device, size == "tiny", int(batch))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> Tensor:
        x, y = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    answer(address, lambda count: take_block(step, device, count))


if __name__ == "__main__":
    main()
