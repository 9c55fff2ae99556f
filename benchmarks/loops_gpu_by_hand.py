"""The loop of loops_gpu.py, made fast by hand.

python loops_gpu_by_hand.py MODEL DEVICE full|tiny SOCKET AMP COMPILE
"""

import sys

import torch
from loops import answer
from loops_gpu import take_block
from models import build
from torch import Tensor, nn

DTYPES = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    """Build the loop named on the command line and serve it."""
    name, device, size, address, amp, mode = sys.argv[1:]
    if amp != "off" and device == "cuda":
        torch.set_float32_matmul_precision("high")
    model, inputs, targets = build(name, device, size == "tiny")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler(device, enabled=amp == "fp16")
    forward = model if mode == "off" else torch.compile(model, mode=mode)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=DTYPES[amp], enabled=amp != "off"):
            loss = nn.functional.cross_entropy(forward(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    answer(address, lambda count: take_block(step, device, count))


if __name__ == "__main__":
    main()
