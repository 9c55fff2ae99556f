"""Processes that a script starts find its ``__main__``, and get nothing of fasttrain."""

from __future__ import annotations

from typing import Any

import pytest

POOLED = b"[(Point(x=2), '%b', False), (Point(x=4), '%b', False)]"


@pytest.mark.parametrize(
    ("method", "main"),
    [("spawn", b"__mp_main__"), ("forkserver", b"__mp_main__"), ("fork", b"__main__")],
)
@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
def test_pools(same_as_python: Any, method: str, main: bytes, module: bool) -> None:
    program = "processes" if module else "processes.py"
    plain = same_as_python(program, method, module=module)
    if not module:
        assert plain.stdout.startswith(POOLED % (main, main))
    assert plain.stdout.endswith(b"\n3\n")


@pytest.mark.parametrize(
    ("how", "line"),
    [("forked", b"parent 6"), ("failing_fork", b"parent 1"), ("command", b"False ['-c', 'a b']")],
)
def test_children(same_as_python: Any, how: str, line: bytes) -> None:
    assert line in same_as_python("processes.py", how).stdout.splitlines()
