"""Runs each loop by the script's optimizer and by the swapped one, and prints how they compare.

Usage: ``swap_trials.py WHEEL CACHE``. One JSON object: the result of each trial by its name.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import simulated_npu
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.levers.npu_optimizer.lever import NpuOptimizerLever

ABSOLUTE, RELATIVE = 1e-6, 1e-5  # what float32 loses in 20 steps of another order of operations


def swapped(work: Callable[[], Any]) -> tuple[Any, Any]:
    """Return what some work gives with the lever in place, and the lever's outcome."""
    ledger = OutcomeRecorder("optimizer", "npu", explicit=True)
    with ExitStack() as undo:
        NpuOptimizerLever(ledger).install(undo)
        result = work()
    return result, ledger.outcome()


def excess(found: Any, expected: Any) -> float:
    """Return the largest difference in units of the tolerance; infinite where the kinds differ."""
    if isinstance(expected, torch.Tensor):
        if (type(found), found.dtype, found.device) != (
            type(expected),
            expected.dtype,
            expected.device,
        ):
            return float("inf")
        a, b = found.detach().cpu().double(), expected.detach().cpu().double()
        ratio = (a - b).abs() / (ABSOLUTE + RELATIVE * b.abs())
        return float(ratio.max().nan_to_num(torch.inf)) if ratio.numel() else 0.0
    if isinstance(expected, dict):
        if list(found) != list(expected):
            return float("inf")
        return max((excess(found[key], expected[key]) for key in expected), default=0.0)
    return 0.0 if found == expected else float("inf")


def _state(result: Any) -> Any:
    model, optimizer = result
    state = optimizer if isinstance(optimizer, dict) else optimizer.state_dict()
    return {"model": dict(model.state_dict()), **state}


def compare(loop: Callable[..., Any], make: Any) -> dict[str, Any]:
    """Return how far the swapped loop ends from the script's own, and how often it was swapped."""
    expected = _state(loop(make))
    result, outcome = swapped(lambda: _state(loop(make)))
    return {
        "excess": excess(result, expected),
        "state": outcome.state,
        "steps": outcome.counts.get("steps", 0),
        "reason": outcome.reason,
    }


def resumed(make: Any, *, swap_first: bool) -> dict[str, Any]:
    """Write a checkpoint with one of the two and go on from it with the other."""

    def first() -> Any:
        model, optimizer = loops.Task(make).steps(loops.MIDDLE)
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def second(checkpoint: Any) -> Any:
        task = loops.Task(make)
        task.model.load_state_dict(checkpoint[0])
        task.optimizer.load_state_dict(checkpoint[1])
        return _state(task.steps(loops.MIDDLE))

    expected = second(first())
    if swap_first:
        checkpoint, outcome = swapped(first)
        result = second(checkpoint)
    else:
        checkpoint = first()
        result, outcome = swapped(lambda: second(checkpoint))
    steps = outcome.counts.get("steps", 0)
    return {"excess": excess(result, expected), "state": outcome.state, "steps": steps}


def sabotaged(name: str, broken: Any) -> dict[str, Any]:
    """Compare while the fused Adam is broken in one way."""
    kind = sys.modules["torch_npu.optim"].NpuFusedAdam
    with mock.patch.object(kind, name, broken):
        return compare(loops.LOOPS["zero_grad"], loops.MAKERS["adam"])


def hooked() -> dict[str, Any]:
    """Count hooks that a script puts on its optimizer, and optimizers that step."""
    seen: list[Any] = []

    def work() -> Any:
        task = loops.Task(loops.MAKERS["adam"])
        task.optimizer.register_step_pre_hook(lambda o, *_: seen.append(type(o).__name__))
        task.optimizer.register_step_post_hook(lambda o, *_: seen.append(type(o).__name__))
        handle = register_optimizer_step_post_hook(
            lambda o, *_: seen.append("any " + type(o).__name__)
        )
        task.steps()
        handle.remove()

    _, outcome = swapped(work)
    return {"seen": {name: seen.count(name) for name in seen}, "state": outcome.state}


def unguarded() -> dict[str, Any]:
    """Train with the bare fused optimizer in a loop that says ``model.zero_grad()``."""
    loop = loops.LOOPS["model.zero_grad"]
    kind = sys.modules["torch_npu.optim"].NpuFusedAdamW
    expected, found = loop(loops.MAKERS["adamw"]), loop(lambda p: kind(p, lr=0.01))
    return {"excess": excess(dict(found[0].state_dict()), dict(expected[0].state_dict()))}


def wrong_step(optimizer: Any, group_index: int) -> None:
    """Move the weights by something, as a kernel that computes something else would."""
    for flat in optimizer.combined_params_indexed_by_group[group_index]:
        if flat is not None:
            flat.mul_(0.999)


def out_of_memory(*_: Any) -> None:
    raise RuntimeError("NPU out of memory")


def main() -> None:
    results: dict[str, Any] = {}

    def record(name: str, trial: Callable[[], Any]) -> None:
        try:
            results[name] = trial()
        except Exception:  # noqa: BLE001 - told by the test that wants this result
            results[name] = {"error": traceback.format_exc()}

    for maker, make in loops.MAKERS.items():
        for name, loop in loops.LOOPS.items():
            record(f"{name} {maker}", lambda loop=loop, make=make: compare(loop, make))
        record(f"resume-native {maker}", lambda make=make: resumed(make, swap_first=True))
        record(f"resume-swapped {maker}", lambda make=make: resumed(make, swap_first=False))
    for name in ("model.zero_grad", "rollback", "scheduler"):
        record(f"{name} lamb", lambda name=name: compare(loops.LOOPS[name], loops.Lamb))
    record("wrong-kernel", lambda: sabotaged("_group_step", wrong_step))
    record("no-memory", lambda: sabotaged("_maybe_init_combined_states", out_of_memory))
    record("hooks", hooked)
    record("unguarded", unguarded)
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    simulated_npu.install_torch_npu(Path(sys.argv[1]), Path(sys.argv[2]))
    import swap_loops as loops

    main()
