"""Errors of scripts and devices for which fp16's loss scaling can't be right."""

from __future__ import annotations

import sys
from typing import Any

from fasttrain.model.errors import FasttrainError
from fasttrain.shim.process.refusal import refuse


def require_infinity(kind: str) -> None:
    """Refuse an NPU whose arithmetic saturates at overflow, whatever the plan assumed.

    The driver does so with INF_NAN_MODE_ENABLE=0 and INF_NAN_MODE_FORCE_DISABLE=1.

    Raises:
        SystemExit: ``amp-fp16``.
    """
    torch_npu: Any = sys.modules.get("torch_npu")
    if kind == "npu" and torch_npu and not torch_npu.npu.utils.is_support_inf_nan():
        refuse(_saturation_refused())


def _saturation_refused() -> FasttrainError:
    return FasttrainError(
        "fp16 can't train on this NPU, which saturates instead of overflowing",
        why="torch_npu reports that it has no inf, by which loss scaling finds the steps to skip",
        fix="unset INF_NAN_MODE_ENABLE, or use --amp bf16 or --amp off",
        slug="amp-fp16",
    )


def step_refused(optimizer: str) -> FasttrainError:
    """Return the error of an optimizer that steps inside the backward pass."""
    return FasttrainError(
        f"fp16 can't train with {optimizer} stepping inside the backward pass",
        why="whether its gradients overflowed is known only after the backward pass",
        fix="use --amp bf16 or --amp off",
        slug="fp16-step-in-backward",
    )


def closure_refused(optimizer: str) -> FasttrainError:
    """Return the error of a step that calls its closure after it has begun."""
    return FasttrainError(
        f"fp16 can't train with {optimizer} and a closure",
        why="its step has already begun when it runs the closure's backward passes, so an overflow"
        " can't be skipped any more",
        fix="use --amp bf16 or --amp off",
        slug="fp16-closure",
    )


def complex_refused() -> FasttrainError:
    """Return the error of complex parameters."""
    return FasttrainError(
        "fp16 can't train complex parameters",
        why="torch.amp's GradScaler, which divides the gradients, has no kernel for complex ones",
        fix="use --amp bf16 or --amp off",
        slug="fp16-complex",
    )


def inputs_refused() -> FasttrainError:
    """Return the error of a backward pass whose ``inputs`` are not leaves."""
    return FasttrainError(
        "fp16 can't make a backward pass for inputs= that are not leaves",
        why="torch prints a warning when the gradients that it leaves there are read, so they can't"
        " be divided by the scale unnoticed",
        fix="call retain_grad() on them instead, or use --amp bf16 or --amp off",
        slug="fp16-inputs",
    )
