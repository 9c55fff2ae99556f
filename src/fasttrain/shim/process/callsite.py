"""Finds where in the user's code something happens, as ``file:line``."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from types import CodeType, FrameType

_GENERATOR = 0x20  # inspect.CO_GENERATOR, whose module takes long to import
_PACKAGE = os.path.abspath(f"{__file__}/../../..") + os.sep  # noqa: PTH100 - files/ and model/ too
_SHIM = os.path.join(_PACKAGE, "shim", "")  # noqa: PTH118
_INSTALLED = tuple(
    os.path.join(sysconfig.get_path(name), "")  # noqa: PTH118
    for name in ("stdlib", "purelib", "platlib")
)
# There are more than this Python's: those of one user, or of the one beneath an environment.
_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")


def own_prefixes() -> tuple[str, ...]:
    """Return the prefixes of the file names of torch's and fasttrain's code."""
    torch = sys.modules.get("torch")
    root = getattr(torch, "__file__", None)
    prefixes = (_PACKAGE, "<", os.path.dirname(os.__file__) + os.sep + "contextlib")  # noqa: PTH120
    return (*prefixes, os.path.dirname(root) + os.sep) if root else prefixes  # noqa: PTH120


def call_site(past: object = None) -> str:
    """Return ``file:line`` of the nearest calling frame that is neither torch's nor fasttrain's.

    Args:
        past: A function of torch's. Wrappers around it are skipped too, such as Lightning's around
            torch.compile.

    A generator of an installed package only passes on what the loop asks for.
    """
    wrappers = set()
    while past is not None:
        wrappers.add(getattr(past, "__code__", None))
        past = getattr(past, "__wrapped__", None)
    frame: FrameType | None = sys._getframe(1)
    prefixes = own_prefixes()
    while frame is not None and (
        frame.f_code in wrappers
        or frame.f_code.co_filename.startswith(prefixes)
        or _passes_on(frame.f_code)
    ):
        frame = frame.f_back
    return location(frame.f_code.co_filename, frame.f_lineno) if frame else "unknown"


def _passes_on(code: CodeType) -> bool:
    """True for a package's generator, such as a progress bar around a DataLoader."""
    return bool(code.co_flags & _GENERATOR) and is_installed(code.co_filename)


def called_by_user(*, through: tuple[str, ...], past: tuple[str, ...] = ()) -> bool:
    """True if the user's code called the shim's function that asks, and not torch's code.

    Args:
        through: Suffixes of the names of files that only pass the call on; these are skipped.
        past: Prefixes of the names of other files that are not the user's.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename.endswith(through):
        frame = frame.f_back
    others = (*own_prefixes(), *past)
    return frame is not None and not frame.f_code.co_filename.startswith(others)


def location(path: str, line: int) -> str:
    """Return ``path:line``, shortened as far as the user can still find the file.

    It is relative to the working directory if it is below it, else to site-packages.
    """
    try:
        relative = os.path.relpath(path)
    except OSError:  # the working directory is gone
        relative = os.pardir
    if not relative.startswith(os.pardir):
        return f"{relative}:{line}"
    _, found, inside = path.rpartition("site-packages" + os.sep)
    return f"{inside if found else path}:{line}"


def is_installed(path: str) -> bool:
    """True if a file of code is of the standard library or of an installed package."""
    return path.startswith(_INSTALLED) or _PACKAGES.search(path) is not None


def is_shim_code(code: CodeType) -> bool:
    """True if a frame's code belongs to the shim."""
    return is_shim_file(code.co_filename)


def is_own_file(path: str) -> bool:
    """True if a file is fasttrain's."""
    return path.startswith(_PACKAGE)


def is_shim_file(path: str) -> bool:
    """True if a file is the shim's."""
    return path.startswith(_SHIM)
