"""Decides whether low precision may be why a call has failed, which is then repeated in fp32."""

from __future__ import annotations

import dis
import re

import torch

from fasttrain.shim.hooks.call_state import is_alone, is_ordinary
from fasttrain.shim.process.callsite import own_prefixes

_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "half"}
_NUMBERS = re.compile(r"(?i)\b(b?float\w*|half|dtype|precision|nan|inf|(in|non-?)?finite)\b")
# Of distributions, of torch's and NumPy's random choices, and of linear algebra.
_SPOILT = re.compile(
    r"(?i)\b(nan|inf|(in|non-?)?finite|satisfy the constraint|probabilit(y|ies)|singular"
    r"|positive[- ]definite)\b"
)


def may_explain(error: Exception, dtype: torch.dtype) -> bool:
    """True if a call that failed in low precision may succeed in fp32, and is to be repeated.

    With several ranks only errors that all ranks get count, such as that of mixed types: a rank
    that repeats a call alone would wait for the others in the call's collectives.
    """
    if not is_ordinary(error):
        return False
    if _by_script(error) and not _about_numbers(error):
        return False  # how the script leaves a call early, or skips a batch
    return is_alone() or names_types(error, dtype)


def _by_script(error: Exception) -> bool:
    """True if a ``raise`` in the script itself raised the error."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    code = last.tb_frame.f_code
    installed = code.co_filename.startswith(own_prefixes()) or "site-packages" in code.co_filename
    return not installed and code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _about_numbers(error: Exception) -> bool:
    """True if an error that the script raised may come from a check of numbers or types."""
    checks = type(error) in (AssertionError, TypeError)
    return checks or _NUMBERS.search(str(error)) is not None


def names_types(error: BaseException, dtype: torch.dtype) -> bool:
    """True if an error's message names types, as torch's does for operands of mixed types."""
    words = str(error).lower()
    return _NAMES[dtype] in words or "dtype" in words or "scalar type" in words


def names_numbers(error: BaseException) -> bool:
    """True if an error's message is about numbers that rounding may have spoilt."""
    return _SPOILT.search(str(error)) is not None
