"""Judges the failure of a call in low precision: may precision explain it, and where was it."""

from __future__ import annotations

import dis
import re
import traceback
from typing import Any

import torch
from torch import distributed as dist

from fasttrain.shim.process.callsite import location, own_prefixes

_LINALG_ERROR: type[Exception] = vars(torch.linalg)["LinAlgError"]
# Exactly these: subclasses are a script's own, which it may raise to leave a forward early, or
# stand for memory and devices.
_MAY_EXPLAIN = frozenset(
    {
        RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError, IndexError,
        KeyError, ZeroDivisionError, OverflowError, FloatingPointError, _LINALG_ERROR,
    }
)  # fmt: skip
_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "half"}
_NUMBERS = re.compile(r"(?i)\b(b?float\w*|half|dtype|precision|nan|inf|(in|non-?)?finite)\b")
MOST_WORDS = 160  # characters of a message that the receipt shows


def may_explain(error: Exception, dtype: torch.dtype) -> bool:
    """Whether a call that failed so in low precision is worth a repeat without it.

    Among several ranks it must fail alike on all of them, as mixed types do: a rank that repeated
    a call alone would wait for the others in its collectives.
    """
    if type(error) not in _MAY_EXPLAIN or "cuda error" in str(error).lower():
        return False
    if _by_script(error) and not _about_numbers(error):
        return False  # how the script leaves a call early, or skips a batch
    group: Any = dist
    alone = not group.is_available() or not group.is_initialized() or group.get_world_size() == 1
    return alone or names_types(error, dtype)


def _by_script(error: Exception) -> bool:
    """Whether a ``raise`` of the script's own has raised it."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    code = last.tb_frame.f_code
    installed = code.co_filename.startswith(own_prefixes()) or "site-packages" in code.co_filename
    return not installed and code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _about_numbers(error: Exception) -> bool:
    """Whether what the script raised may be its judgement of numbers or of their types."""
    checks = type(error) in (AssertionError, TypeError)
    return checks or _NUMBERS.search(str(error)) is not None


def names_types(error: BaseException, dtype: torch.dtype) -> bool:
    """Whether an error speaks of types, as that of a function does which meets mixed ones."""
    words = str(error).lower()
    return _NAMES[dtype] in words or "dtype" in words or "scalar type" in words


def told(error: Exception) -> str:
    """Return an error in one line, with the line of the script that it comes from."""
    prefixes = own_prefixes()
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(prefixes)
    ]
    first_line = (str(error).strip().splitlines() or [""])[0]
    words = f"{type(error).__name__}: {first_line[:MOST_WORDS]}"
    return f"{words} ({location(*frames[-1])})" if frames else words
