"""Where fp16's loss scaling can't be right, told as errors."""

from __future__ import annotations

import sys
from typing import Any

from fasttrain.model.errors import FasttrainError
from fasttrain.shim.process.refusal import refuse


def require_infinity(kind: str) -> None:
    """Refuse an NPU that saturates, whatever the plan has taken it for.

    Its driver can be told to: INF_NAN_MODE_ENABLE=0 with INF_NAN_MODE_FORCE_DISABLE=1.
    """
    torch_npu: Any = sys.modules.get("torch_npu")
    if kind == "npu" and torch_npu and not torch_npu.npu.utils.is_support_inf_nan():
        refuse(_saturation_refused())


def _saturation_refused() -> FasttrainError:
    return FasttrainError(
        "fp16 can't train on this NPU, which saturates where it overflows",
        why="torch_npu says that it has no inf, by which loss scaling finds the steps to skip",
        fix="unset INF_NAN_MODE_ENABLE, or use --amp bf16 or --amp off",
        slug="amp-fp16",
    )


def step_refused(optimizer: str) -> FasttrainError:
    """Return the error of a step inside of the backward pass."""
    return FasttrainError(
        f"fp16 can't train with {optimizer} stepping inside the backward pass",
        why="whether its gradients overflowed is only known behind the pass",
        fix="use --amp bf16 or --amp off",
        slug="fp16-step-in-backward",
    )


def closure_refused(optimizer: str) -> FasttrainError:
    """Return the error of a step that runs its closure when it has begun."""
    return FasttrainError(
        f"fp16 can't train with {optimizer} and a closure",
        why="its step runs the closure's backward passes when it has begun, where an overflow"
        " can't be skipped any more",
        fix="use --amp bf16 or --amp off",
        slug="fp16-closure",
    )


def complex_refused() -> FasttrainError:
    """Return the error of a gradient of complex numbers."""
    return FasttrainError(
        "fp16 can't train complex parameters",
        why="torch.amp's GradScaler, which divides the gradients, has no kernel for complex ones",
        fix="use --amp bf16 or --amp off",
        slug="fp16-complex",
    )


def inputs_refused() -> FasttrainError:
    """Return the error of a pass that is for tensors in the middle of the graph."""
    return FasttrainError(
        "fp16 can't make a backward pass for inputs= that are no leaves",
        why="torch warns of each look at the gradient that it leaves there, so that it can't be"
        " divided by the scale unseen",
        fix="call retain_grad() on them instead, or use --amp bf16 or --amp off",
        slug="fp16-inputs",
    )
