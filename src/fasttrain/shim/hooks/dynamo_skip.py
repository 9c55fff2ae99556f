"""Keeps torch.compile off fasttrain's own functions, where they run between graphs."""

from __future__ import annotations

from typing import Any

import torch


def pass_over(function: Any, *, all_it_calls: bool = False) -> None:
    """Let dynamo pass over a function's own frame, as it does over those of torch.nn.

    Behind a graph break every frame that runs would be compiled, all calls of one function against
    the one recompile limit of its code.

    Args:
        function: A Python function.
        all_it_calls: Pass over what runs inside of it too.

    Source: ``torch/_dynamo/eval_frame.py`` of torch 2.13, ``skip_code``; up to 2.5 it is in C.
    """
    frames: Any = torch._C._dynamo.eval_frame  # torch._dynamo itself is not imported for this
    if hasattr(frames, "set_code_exec_strategy"):
        action = frames._FrameAction
        inside = action.SKIP if all_it_calls else action.DEFAULT
        strategy = frames._FrameExecStrategy(action.SKIP, inside)
        frames.set_code_exec_strategy(function.__code__, strategy)
    elif hasattr(frames, "skip_code"):
        frames.skip_code(function.__code__)
