"""Makes warnings that point at a line of the shim's point at the user's line instead.

``warnings.warn(..., stacklevel=3)`` in a forward points at the caller of its caller. Under plain
python that is torch's ``Module.__call__``; here it may be a function of the shim's, and a warning
of torch's or of the script's would look like one of fasttrain's.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import ExitStack
from types import FrameType
from typing import Any

from fasttrain.shim.hooks import patching
from fasttrain.shim.process.callsite import is_shim_file, own_prefixes


def name_users_lines(undo: ExitStack) -> None:
    """Format such warnings with the place in the user's code; no-op where the script formats."""
    patching.wrap(warnings, "formatwarning", _naming_users, undo)


def _naming_users(original: Any) -> Any:
    def formatwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        if is_shim_file(filename) and (frame := _user_of(filename, lineno)) is not None:
            filename, lineno, line = frame.f_code.co_filename, frame.f_lineno, None
        return str(original(message, category, filename, lineno, line))

    return formatwarning


def _user_of(filename: str, line: int) -> FrameType | None:
    """Return the user's frame that called, directly or not, a line of the shim's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename, frame.f_lineno) != (filename, line):
        frame = frame.f_back
    prefixes = own_prefixes()
    while frame is not None and frame.f_code.co_filename.startswith(prefixes):
        frame = frame.f_back
    return frame
