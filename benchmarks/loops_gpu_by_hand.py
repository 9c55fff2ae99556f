"""The loop of loops_gpu.py, made fast by hand.

As ``same`` it has what fasttrain changes, and nothing else: the difference is fasttrain's overhead.
As ``expert`` it has all that somebody who may edit the script would do: channels_last for images,
cuDNN's search for the fastest kernels, pinned batches that are copied while the GPU computes, and
the loss in the compiled graph, which a mode such as reduce-overhead replays as a CUDA graph.

python loops_gpu_by_hand.py MODEL DEVICE full|tiny BATCH SOCKET same|expert AMP COMPILE
"""

import sys
from collections.abc import Callable

import torch
from loops import answer
from loops_gpu import take_block
from models import build
from torch import Tensor, nn

DTYPES = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Loss = Callable[[Tensor, Tensor], Tensor]
Batch = Callable[[], tuple[Tensor, Tensor]]


def same_loss(model: nn.Module, device: str, amp: str, mode: str) -> Loss:
    """Return the loss with the levers of fasttrain: only the model is compiled."""
    forward = model if mode == "off" else torch.compile(model, mode=mode)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device, dtype=DTYPES[amp], enabled=amp != "off"):
            output = forward(x)
        return nn.functional.cross_entropy(output.float(), y)

    return loss_of


def expert_loss(model: nn.Module, device: str, amp: str, mode: str) -> Loss:
    """Return the loss, all of it in one compiled graph."""

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device, dtype=DTYPES[amp], enabled=amp != "off"):
            return nn.functional.cross_entropy(model(x), y)

    return loss_of if mode == "off" else torch.compile(loss_of, mode=mode)


def same_batch(inputs: Tensor, targets: Tensor, device: str) -> Batch:
    """Return what copies a batch to the device, and waits for it."""
    return lambda: (inputs.to(device), targets.to(device))


def expert_batch(inputs: Tensor, targets: Tensor, device: str) -> Batch:
    """Return what copies a batch from pinned memory while the device computes."""
    if inputs.dim() == 4:  # images (batch, channels, height, width)
        inputs = inputs.to(memory_format=torch.channels_last)
    if device == "cuda":
        inputs, targets = inputs.pin_memory(), targets.pin_memory()
    return lambda: (inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True))


def tune_for(model: nn.Module, images: bool) -> None:
    """Set what only an expert sets."""
    torch.backends.cudnn.benchmark = True
    if images:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def main() -> None:
    """Build the loop named on the command line and serve it."""
    name, device, size, batch, address, kind, amp, mode = sys.argv[1:]
    if amp != "off" and device == "cuda":
        torch.set_float32_matmul_precision("high")
    model, inputs, targets = build(name, device, size == "tiny", int(batch))
    if kind == "expert":
        tune_for(model, images=inputs.dim() == 4)
        next_batch = expert_batch(inputs, targets, device)
        loss_of = expert_loss(model, device, amp, mode)
    else:
        next_batch = same_batch(inputs, targets, device)
        loss_of = same_loss(model, device, amp, mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler(device, enabled=amp == "fp16")

    def step() -> Tensor:
        # Without this, a CUDA graph's memory could be reused before the last step has read it.
        torch.compiler.cudagraph_mark_step_begin()
        x, y = next_batch()
        optimizer.zero_grad()
        loss = loss_of(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    answer(address, lambda count: take_block(step, device, count))


if __name__ == "__main__":
    main()
