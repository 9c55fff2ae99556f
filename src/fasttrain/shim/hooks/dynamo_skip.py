"""Keeps torch.compile from compiling fasttrain's own functions, which run between graphs."""

from __future__ import annotations

from typing import Any

import torch


def pass_over(function: Any, *, all_it_calls: bool = False) -> None:
    """Have dynamo skip a function's own frame, as it skips those of torch.nn.

    After a graph break dynamo compiles every frame that runs. Whatever a wrapper of ours is called
    with would count against the one recompile limit of its code object.

    Args:
        function: A Python function.
        all_it_calls: Skip the functions that it calls, too.

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
