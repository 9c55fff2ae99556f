"""Puts dynamo's reasons for compiling again into words.

A reason names the first condition of a compiled graph that a call didn't meet: a check of a tensor
or of torch's settings, in a sentence of dynamo's, or a Python expression that was true. What is of
another form stays as dynamo has it.

Source: ``TensorCheck`` and ``GlobalStateGuard`` in ``torch/csrc/dynamo/guards.cpp``, and
``get_guard_fail_reason_helper`` in ``torch/_dynamo/guards.py``, of torch 2.13.
"""

from __future__ import annotations

import re

_COMPILATION = re.compile(r"^\d+/\d+(_\d+)?: ")
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")  # self._modules['fc']
_INDEX = re.compile(r"\._modules\['(\d+)'\]")  # of a Sequential
# An expression, the line of code that it comes from, and the place of that line.
_EXPRESSION = re.compile(r"(.+?)\s+# .*?# (\S+:\d+ in \w+)")
_SENTENCES = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"GLOBAL_STATE changed: grad_mode\b", "gradients were switched on or off"),
        (r"GLOBAL_STATE changed: (.+)", r"a setting of torch changed: \1"),
        (
            r"expected type of '(.+?)' to be a tensor type\b.* but found <class '(?:.+\.)?(\w+)'>",
            r"\1 is a \2 now, and was of another class",
        ),
        (
            r"tensor '(.+)' size mismatch at index (\d+)\. expected (\d+), actual (\d+)",
            r"\1 has size \4 in dimension \2, not \3",
        ),
        (
            r"tensor '(.+)' rank mismatch\. expected (\d+), actual (\d+)",
            r"\1 has \3 dimensions, not \2",
        ),
        (r"tensor '(.+)' dtype mismatch\. expected (\w+), actual (\w+)", r"\1 is \3, not \2"),
        (
            r"tensor '(.+)' stride mismatch at index (\d+)\. expected (\d+), actual (\d+)",
            r"\1 lies in memory in another way: its stride in dimension \2 is \4, not \3",
        ),
        (
            r"tensor '(.+)' requires_grad mismatch\. expected requires_grad=0",
            r"\1 needs gradients now, and didn't before",
        ),
        (
            r"tensor '(.+)' requires_grad mismatch\. expected requires_grad=1",
            r"\1 needed gradients before, and doesn't now",
        ),
    )
)


def in_words(reason: str) -> str:
    """Return why a call fitted no graph, in words as far as the reason has a known form."""
    line = " ".join(_COMPILATION.sub("", reason.strip()).split("\n")[0].split())
    line = _MEMBER.sub(r".\1", _INDEX.sub(r"[\1]", line))
    for pattern, words in _SENTENCES:
        if found := pattern.match(line):
            return found.expand(words)
    if found := _EXPRESSION.match(line):
        return f"{found[1]} is no longer true, at {found[2]}"
    return line
