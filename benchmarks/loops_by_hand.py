"""The loops of loops.py with mixed precision, compilation and a fused optimizer written by hand.

python loops_by_hand.py VARIANT BATCH SOCKET AMP COMPILE
"""

import sys
from collections.abc import Callable

import torch
from loops import build, serve, train_step
from torch import Tensor


def in_bf16(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Give a forward that computes under bf16 autocast and hands out fp32."""

    def call(inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return forward(inputs).float()

    return call


def main() -> None:
    """Build the loop named on the command line and serve it."""
    variant, batch, address, amp, mode = sys.argv[1:]
    model, inputs, targets = build(variant, int(batch))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward: Callable[[Tensor], Tensor] = model
    if mode != "off":
        forward = torch.compile(model, mode=mode)
    if amp == "bf16":
        forward = in_bf16(forward)
    serve(address, lambda: train_step(forward, optimizer, inputs, targets))


if __name__ == "__main__":
    main()
