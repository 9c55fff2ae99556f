"""A script ends as under python: exit code, signal, last words, order of what is left to do."""

from __future__ import annotations

from typing import Any

import pytest

# What Python's own documentation, or the shell's 128 + N, says of each way.
EXPECTED = {
    "end": 0, "text": 1, "object": 1, "none": 0, "true": 1, "3": 3, "256": 0, "259": 3, "-1": 255,
    "huge": 255, "thread": 0, "hook": 9, "at-once": 7, "interrupted": -2, "ignoring-interrupt": 4,
    "SIGINT": -2, "SIGTERM": -15, "SIGKILL": -9, "SIGSEGV": -11, "SIGPIPE": -13, "abort": -6,
}  # fmt: skip


@pytest.mark.parametrize("way", EXPECTED)
def test_exit_code_and_last_words(same_as_python: Any, way: str) -> None:
    assert same_as_python("exits.py", way).returncode == EXPECTED[way]


def test_threads_atexit_and_finalizers_in_order(same_as_python: Any) -> None:
    said = same_as_python("lifecycle.py").stdout.decode().splitlines()
    assert [line.split(";")[0] for line in said] == [
        "main ends",
        "the thread outlived main False",
        "atexit second 3 True",
        "atexit first 3 True",
        "finalized",
    ]
