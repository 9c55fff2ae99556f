"""The loops of loops.py with every lever written by hand.

python loops_by_hand.py VARIANT BATCH SOCKET AMP COMPILE OPTIMIZER MATMUL
"""

import sys
from collections.abc import Callable

import torch
from loops import build, serve, train_step
from torch import Tensor, nn

Forward = Callable[[Tensor], Tensor]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def under_autocast(forward: Forward, dtype: torch.dtype) -> Forward:
    """Return a forward that computes under autocast and returns fp32."""

    def call(inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return forward(inputs).float()

    return call


def scaled_step(
    forward: Forward,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    inputs: Tensor,
    targets: Tensor,
) -> Tensor:
    """Take one optimizer step with loss scaling and return its loss."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(forward(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss


def main() -> None:
    """Build the loop named on the command line and serve it."""
    variant, batch, address, amp, mode, implementation, matmul = sys.argv[1:]
    model, inputs, targets = build(variant, int(batch))
    fused = True if implementation == "fused" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    if matmul != "keep":
        torch.set_float32_matmul_precision(matmul)
    forward: Forward = model
    if mode != "off":
        forward = torch.compile(model, mode=mode)
    if amp != "off":
        forward = under_autocast(forward, DTYPES[amp])
    if amp == "fp16":
        scaler = torch.amp.GradScaler("cpu")
        serve(address, lambda: scaled_step(forward, optimizer, scaler, inputs, targets))
    else:
        serve(address, lambda: train_step(forward, optimizer, inputs, targets))


if __name__ == "__main__":
    main()
