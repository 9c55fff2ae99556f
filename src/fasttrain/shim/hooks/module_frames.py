"""What stands above a module's call on the stack: a constructor, or a forward called by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FrameType

from torch.nn import Module

from fasttrain.shim.process.callsite import location


def in_constructor() -> bool:
    """Whether a module is being made: its parts are called to learn their shapes or strides."""
    return next(_frames_of_modules("__init__"), None) is not None


def whose_forward(part: Module) -> str:
    """Return the module that holds a part and whose ``forward`` the script called directly.

    ``model.forward(x)`` passes by ``Module.__call__``, and with it by hooks and levers.

    Returns:
        Its class and the line of the call; empty where the call of the part has no such frame.
    """
    for frame, module in _frames_of_modules("forward"):
        caller = frame.f_back
        inside = any(other is part for other in Module.modules(module))
        if caller is not None and module is not part and inside:
            return f"{type(module).__name__} ({location(*_place(caller))})"
    return ""


def _frames_of_modules(name: str) -> Iterator[tuple[FrameType, Module]]:
    """Yield the frames of methods of that name whose object is a module, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code: CodeType = frame.f_code
        if code.co_name == name and code.co_varnames:  # f_locals copies: only where it helps
            owner = frame.f_locals.get(code.co_varnames[0])
            if isinstance(owner, Module):
                yield frame, owner
        frame = frame.f_back


def _place(frame: FrameType) -> tuple[str, int]:
    return frame.f_code.co_filename, frame.f_lineno
